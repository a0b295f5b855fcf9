"""torchtitan's own conversion of a Llama's state dict to Hugging Face's: `IN.pt OUT.pt HEADS KV_HEADS WIDTH`.

The conversion is its own; the packages around it need Triton, and are left out.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

models = Path(importlib.util.find_spec("torchtitan").origin).parent / "models"
for name in ("models", "models.llama3", "models.common"):
    package = ModuleType(f"torchtitan.{name}")
    package.__path__ = [str(models.parent / name.replace(".", "/"))]
    sys.modules[package.__name__] = package
for name, kind in (("llama3.model", "Llama3Model"), ("common.rope", "ComplexRoPE")):
    module = ModuleType(f"torchtitan.models.{name}")
    setattr(module, kind, SimpleNamespace(Config=None))
    sys.modules[module.__name__] = module
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter  # noqa: E402

source, target, heads, kv_heads, width = sys.argv[1:]
attention = SimpleNamespace(n_heads=int(heads), n_kv_heads=int(kv_heads), head_dim=None)
config = SimpleNamespace(layers=[SimpleNamespace(attention=attention)], dim=int(width), enable_weight_tying=False)
torch.save(Llama3StateDictAdapter(config, None).to_hf(torch.load(source)), target)
