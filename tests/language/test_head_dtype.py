"""`model.head_dtype: float32`: logits in float32 from a model of half precision."""

import pytest
import torch
import torch.nn.functional as F

from flowrl.errors import UserError
from flowrl.models.language.head import Float32Head
from flowrl.session.progress import Progress
from tests.support import runs, text_runs, tiny_lm
from tests.support.iterations import iterate


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of one model with its own head, and of one that is tied to the embedding."""
    folders = {}
    for tied in (False, True):
        folder = folders[tied] = tmp_path_factory.mktemp("lm")
        tiny_lm.llama(tied=tied).save_pretrained(folder)
        tiny_lm.tokenizer().save_pretrained(folder)
    return folders


def opened(source, folder, lora=None, dtype="bfloat16", head="float32"):
    tree = text_runs.tree(source, folder, text_runs.GRPO)
    tree["model"] |= {"dtype": dtype, "head_dtype": head, "lora": lora}
    return runs.opened(tree, folder)


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all", "lora"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_same_weights_in_float32(sources, tmp_path, tied, lora):
    session = opened(sources[tied], tmp_path, lora)
    model = session.learner.policy.model  # type: ignore[attr-defined]
    ids = torch.tensor([[2, 3, 4, 5]])
    for _ in range(2):  # also after a step, which changes a tied head's weights
        head = model.get_output_embeddings()
        assert isinstance(head, Float32Head)
        assert (head.weight is model.get_input_embeddings().weight) == tied
        hidden = model.base_model(input_ids=ids)[0]
        assert hidden.dtype == torch.bfloat16
        logits = model(input_ids=ids).logits
        assert torch.equal(logits, F.linear(hidden.float(), head.weight.float()))
        before = head.weight.detach().clone()
        iterate(session, Progress())
        assert torch.equal(before, head.weight) == (lora is not None)


def test_a_model_of_float32_has_no_such_setting(sources, tmp_path):
    with pytest.raises(UserError, match="head_dtype: float32 is for half-precision models"):
        opened(sources[False], tmp_path, dtype="float32")
