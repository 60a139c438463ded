"""The names that flowrl imports from `transformers` itself, for the type checker alone.

The package's own `__init__` imports all models by `*`, and the checker would read each of them: a
file that imports one model takes it 23 seconds of a processor, and 5 with this list. These are the
same classes, from the modules that define them. The checker refuses an import of a name that is not
listed here: add its line.
"""

from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.logits_process import LogitsProcessor as LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList as LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria as StoppingCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList as StoppingCriteriaList
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.feature_extraction_auto import (
    AutoFeatureExtractor as AutoFeatureExtractor,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor as AutoImageProcessor
from transformers.models.auto.modeling_auto import AutoModel as AutoModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    AutoModelForImageClassification as AutoModelForImageClassification,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForImageTextToText as AutoModelForImageTextToText,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForInstanceSegmentation as AutoModelForInstanceSegmentation,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForObjectDetection as AutoModelForObjectDetection,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForTokenClassification as AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForUniversalSegmentation as AutoModelForUniversalSegmentation,
)
from transformers.models.auto.processing_auto import AutoProcessor as AutoProcessor
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.blip.configuration_blip import BlipTextConfig as BlipTextConfig
from transformers.models.blip.configuration_blip import BlipVisionConfig as BlipVisionConfig
from transformers.models.blip.modeling_blip import BlipVisionModel as BlipVisionModel
from transformers.models.clap.modeling_clap import ClapModel as ClapModel
from transformers.models.clip.configuration_clip import CLIPConfig as CLIPConfig
from transformers.models.clip.modeling_clip import CLIPModel as CLIPModel
from transformers.models.clip.modeling_clip import CLIPVisionModel as CLIPVisionModel
from transformers.models.dinov2.modeling_dinov2 import Dinov2Model as Dinov2Model
from transformers.models.siglip.modeling_siglip import SiglipModel as SiglipModel
from transformers.models.t5.configuration_t5 import T5Config as T5Config
from transformers.models.t5.modeling_t5 import (
    T5ForConditionalGeneration as T5ForConditionalGeneration,
)
from transformers.models.vit.modeling_vit import ViTModel as ViTModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.utils.quantization_config import GgufConfig as GgufConfig

__version__: str
