"""From a command to a first token: `python first_token.py ours|theirs FOLDER TOKEN…`, as a user's script would do it.

Loads the model saved in FOLDER in bf16 and prints the token that follows the prompt. A process of its own for each side
and time: `benchmarks.generate` (table `command`) starts them and holds the clock.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

side, folder, prompt = sys.argv[1], sys.argv[2], [int(token) for token in sys.argv[3:]]
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
if side == "ours":
    from deepspeed.inference import Generator, SamplingParams

    found = Generator(model).generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))[0]
else:
    made = model.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False, pad_token_id=0)
    found = made[0, len(prompt) :].tolist()
print(*found)
