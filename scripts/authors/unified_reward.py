"""UnifiedReward's clients: python scripts/authors/unified_reward.py CHECKOUT (UnifiedReward).

Runs in flowrl's own environment, with PYTHONPATH=. for the tests' server. Each of the authors'
clients for images is run with a prompt and drawn images; what it sends to a server is compared, to
the byte, with what the reward `unified_reward` sends when its question is that client's. The
answers that the clients show as examples are read, and compared with their numbers.
"""

import ast
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import checkout, pictures, png_files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from rewards import Samples, load
from rewards.load import load_judge
from tests.support.servers import ChatServer

PROMPT = "a {red} 'ball' on\na \\hill"
SECOND = "inference_qwen/UnifiedReward-2.0-inference"
THINK = "UnifiedReward-Think/inference_qwen/UnifiedReward-Think-qwen3-inference"
CLIENTS = {  # the client, and the images that it shows: a source, and one or two samples
    f"{SECOND}/point_score_ACS_image_generation.py": (False, 1),
    f"{SECOND}/pair_score_image_generation.py": (False, 2),
    f"{THINK}/qwen3_infer_cot_image_generation.py": (False, 2),
    "UnifiedReward-Flex/flex_pair_rank_image_generation.py": (False, 2),
    "UnifiedReward-Edit/edit_pairwise_rank.py": (True, 2),
    "UnifiedReward-Edit/edit_paiwise_score.py": (True, 2),
}
FIRST = {1: "Alignment Score (1-5): 3", 2: "Image 1 is better."}


def sent(root, client, prompt, files, answer):
    """The body of the client's request about these images."""
    source = (root / client).read_text(encoding="utf-8")
    source = re.sub(r"(?m)^(prompt|instruction) = (''|\"\")", r"\1 = PROMPT", source)
    left = iter(files)
    source = re.sub(r"(?<== )''|'/path/to/\w+'", lambda _: repr(next(left)), source)
    with ChatServer(lambda *_: answer) as server:
        here = server.url.removesuffix("/v1")
        exec(source.replace("http://localhost:8080", here), {"PROMPT": prompt})
    assert next(left, None) is None, client
    return server.bodies[0]


def ours(question, files, images, edit, answer):
    """The body of the reward's request."""
    Path("question.txt").write_text(question, encoding="utf-8")
    media = torch.from_numpy(images[edit:]).movedim(-1, -3).float() / 255
    meta = [{"source": files[0]}] * len(media)
    samples = Samples(media, [PROMPT] * len(media), torch.zeros(len(media)).long(), meta)
    own = {"model": "tiny", "question": "question.txt", "tries": 1}
    own |= {"column": "source"} if edit else {}
    with ChatServer(lambda *_: answer) as server:
        if len(media) == 1:
            load("unified_reward", url=server.url, **own)(samples)
        else:
            pair = torch.tensor([0]), torch.tensor([1])
            load_judge("unified_reward", url=server.url, both_orders=False, **own)(samples, *pair)
    return server.bodies[0]


def example_score(root, client, one):
    """Our reading of the example answer that a client ends with, and its numbers' own."""
    from rewards.judging import answers
    from rewards.judging.chat import Completion

    texts = [
        node.value.value
        for node in ast.parse((root / client).read_text(encoding="utf-8")).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    (text,) = [text for text in texts if "xample output" in text]
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", text)]
    whole = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    answer = Completion.model_validate(whole)
    if one:
        return answers.score_in(answer), (float(np.mean(numbers)) - 1) / 4
    pairs = np.array(numbers).reshape(-1, 2)
    return answers.verdict_in(answer), float((pairs[:, 0] / pairs.sum(1)).mean())


def main():
    root = checkout()
    os.chdir(tempfile.mkdtemp())
    for client, (edit, samples) in CLIENTS.items():
        images = pictures(samples + edit, 40, 56, seed=samples)
        files, answer = png_files(".", images), FIRST[samples]
        question = sent(root, client, "{prompt}", files, answer)["messages"][0]["content"][-1]
        theirs = sent(root, client, PROMPT, files, answer)
        mine = ours(question["text"], files, images, edit, answer)
        for name in ("messages", "max_tokens"):
            assert json.dumps(mine[name]) == json.dumps(theirs[name]), (client, name)
        print(client, "the same request")
    for client, one in ((c, n == 1) for c, (_, n) in CLIENTS.items() if c.startswith(SECOND)):
        read, numbers = example_score(root, client, one)
        assert abs(read - numbers) < 1e-12
        print(client, "example", read)


if __name__ == "__main__":
    main()
