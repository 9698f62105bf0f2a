"""The idea on one page: rows of mixed age in one pass through a Llama's own modules, equal to its `generate`.

`python -m tests.unit.inference.one_page` prints the tokens of both. It shares no code with the package.
"""

from __future__ import annotations

import torch
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PAGE, PAGES, NEW, CHUNK = 4, 64, 24, 5


class Pages(Cache):
    """Keys and values of all sequences in pages; a pass says which slot each of its rows has."""

    def __init__(self, config: LlamaConfig) -> None:
        shape = (config.num_hidden_layers, PAGES * PAGE, config.num_key_value_heads, config.head_dim)
        self.layers, self.keys, self.values = [], torch.zeros(shape), torch.zeros(shape)
        self.spans: list[tuple[int, int, torch.Tensor]] = []  # first row, end row, slots of the whole context

    def update(self, key, value, layer_idx, *_, **__):
        slots = torch.cat([context[first - end :] for first, end, context in self.spans])
        self.keys[layer_idx, slots], self.values[layer_idx, slots] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        return key, value

    def attend(self, module, query, key, value, mask, scaling, **_):
        out = []
        for first, end, slots in self.spans:
            k, v = (pool[module.layer_idx, slots].transpose(0, 1) for pool in (self.keys, self.values))
            rows, whole = end - first, len(slots)
            allowed = torch.ones(rows, whole, dtype=torch.bool).tril(whole - rows)
            one = torch.nn.functional.scaled_dot_product_attention(
                query[0, :, first:end], k, v, allowed, scale=scaling, enable_gqa=True
            )
            out.append(one.transpose(0, 1))
        return torch.cat(out)[None], None


@torch.no_grad()
def both() -> tuple[list[list[int]], list[list[int]]]:
    """(tokens of the packed pass, tokens of HF's generate), for prompts of unequal length entering at unequal times."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    prompts = [torch.randint(3, 256, (length,)).tolist() for length in (1, 17, 9, 30)]
    wanted = [
        model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False, eos_token_id=-1)[0, len(p) :].tolist()
        for p in prompts
    ]
    cache = Pages(config)
    ALL_ATTENTION_FUNCTIONS.register("one_page", cache.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("one_page", lambda **_: None)
    model.set_attn_implementation("one_page")
    free = torch.randperm(PAGES).tolist()
    tokens, seen = [list(p) for p in prompts], [0] * len(prompts)
    tables: list[list[int]] = [[] for _ in prompts]
    for step in range(100):
        rows: list[int] = []
        positions: list[int] = []
        cache.spans, ends = [], []
        for i, (known, table) in enumerate(zip(tokens, tables, strict=True)):
            if step < 3 * i or len(known) == len(prompts[i]) + NEW:  # enters later; done
                continue
            end = min(seen[i] + CHUNK, len(known))
            while len(table) * PAGE < end:
                table.append(free.pop())
            slots = torch.tensor([table[at // PAGE] * PAGE + at % PAGE for at in range(end)])
            cache.spans.append((len(rows), len(rows) + end - seen[i], slots))
            rows += known[seen[i] : end]
            positions += range(seen[i], end)
            seen[i] = end
            ends.append((i, len(rows) - 1))
        if not rows:
            break
        logits = model(torch.tensor([rows]), position_ids=torch.tensor([positions]), past_key_values=cache).logits[0]
        for i, row in ends:
            if seen[i] == len(tokens[i]):
                tokens[i].append(int(logits[row].argmax()))
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)], wanted


if __name__ == "__main__":
    for found, wanted in zip(*both(), strict=True):
        print("equal" if found == wanted else "OTHERS", len(set(found)), "different tokens", found)
