"""A trained chat model learns from a reward: `python examples/rollouts/trained.py --model FOLDER`.

The prompts ask what a thing is. The reward of an answer is a function of its text: the answer ends within the limit,
names the thing, and says the rest without the letter e. LoRA matrices change the model, by GRPO on answers that the
engine draws in each update, or (`--method dpo`) by DPO on the best and the worst answer of the untrained model to each
prompt. In both, log-probabilities have the bits of generation: every ratio of GRPO is exactly 1, and DPO begins at a
loss of exactly log 2.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import deepspeed
from deepspeed.inference import SamplingParams
from deepspeed.rollouts.logprobs import exact_logprobs, torch_logprobs
from deepspeed.rollouts.losses import grpo_advantages, grpo_loss, kl_k3

THINGS = (
    "moon tea bridge rain winter river football honey bread island book window garden horse piano train city forest "
    "ship apple clock mountain school doctor storm camera farm lion kitchen road lamp sugar coat wolf song map dog "
    "shirt ocean glass milk knight bank robot salt cloud chair gold"
).split()
QUESTIONS = ("What is {}?", "Explain to a child: {}.", "Say something about {}.", "Describe {} in a few words.")
HELD_OUT = 8  # things that are not trained on
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PARTS = {"generate": "tab:blue", "score": "tab:gray", "train": "tab:orange"}

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a Hugging Face folder with a chat template")
parser.add_argument("--method", choices=("grpo", "dpo"), default="grpo")
parser.add_argument("--updates", type=int, default=30)
parser.add_argument("--prompts", type=int, default=4, help="prompts, or pairs of DPO, of a rank in each update")
parser.add_argument("--group", type=int, default=4, help="answers to each prompt")
parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer at most")
parser.add_argument("--pool", type=int, default=32, help="prompts of a rank from whose answers DPO makes its pairs")
parser.add_argument("--every", type=int, default=15, help="updates between two looks at things that are held out")
parser.add_argument("--rate", type=float, default=1e-3)
parser.add_argument("--beta", type=float, default=0.1, help="of DPO")
parser.add_argument("--lora", type=int, default=8, help="rank of the LoRA matrices")
parser.add_argument("--layers", type=int, default=10, help="last layers that get LoRA matrices; backward ends there")
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--bf16", action="store_true", help="instead of fp32")
parser.add_argument("--output", default="runs/rollouts", help="the folder for figures, picture and adapter")
parser.add_argument("--local_rank", type=int, default=-1)
arguments = parser.parse_args()


def prompt_of(thing, question):
    """The tokens of a question about a thing."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question.format(thing)}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def reward_of(thing, answer):
    """The mean of three parts: the answer ends by itself, names the thing, and has at least four words without an e."""
    text = tokenizer.decode(answer.tokens, skip_special_tokens=True).lower()
    others = [word for word in text.split() if thing not in word]
    share = sum("e" not in word for word in others) / max(4, len(others))
    return ((answer.finish_reason == "stop") + (thing in text) + share) / 3


def drawn(questions, seed, count):
    """`count` answers to each (thing, question), and their rewards."""
    sampling = SamplingParams(max_new_tokens=arguments.tokens, temperature=1.0, seed=seed)
    answers = engine.rollout([prompt_of(*each) for each in questions], sampling, n=count)
    return answers, torch.tensor([reward_of(questions[at // count][0], each) for at, each in enumerate(answers)])


def scores(answers):
    """Log-probabilities of the answers' tokens under the present weights, with the bits of generation."""
    sequences = engine.score([answer.prompt + answer.tokens for answer in answers], SamplingParams(temperature=1.0))
    return [row[len(answer.prompt) - 1 :].tolist() for row, answer in zip(sequences, answers, strict=True)]


class Rows:
    """Prompts with their answers, padded on the right; columns before the shortest prompt's end have no logits."""

    def __init__(self, answers):
        self.ids = self._padded([answer.prompt + answer.tokens for answer in answers], 0)
        self.first = min(len(answer.prompt) for answer in answers) - 1
        self.before = [len(answer.prompt) - 1 - self.first for answer in answers]
        self.mask = self.aligned([[True] * len(answer.tokens) for answer in answers], False)
        self.answers = self.ids[:, self.first + 1 :]

    @staticmethod
    def _padded(rows, value):
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, value).to(engine.device)

    def aligned(self, rows, value=0.0):
        """Values by token of the answers, in the columns of the logits."""
        return self._padded([[value] * before + row for before, row in zip(self.before, rows, strict=True)], value)

    def logits(self):
        """Logits of a forward in training, at the positions before the answers' tokens."""
        columns = torch.arange(self.first, self.ids.shape[1] - 1, device=engine.device)
        return engine(input_ids=self.ids, logits_to_keep=columns).logits


def over_ranks(value):
    """The mean over all ranks."""
    total = torch.tensor(float(value), device=engine.device)
    deepspeed.comm.all_reduce(total)
    return total.item() / ranks


def look():
    """Mean reward of answers about the held-out things, and KL(trained | untrained) by token (k3)."""
    answers, rewards = drawn([(thing, question) for thing in held_out for question in QUESTIONS], 1, 1)
    with model.disable_adapter():
        reference = scores(answers)
    rows = Rows(answers)
    values, reference = rows.aligned([answer.logprobs for answer in answers]), rows.aligned(reference)
    return rewards.mean().item(), kl_k3(values, reference)[rows.mask].mean().item()


def grpo(update):
    """One update by GRPO on answers that are drawn now."""
    begin = time.process_time()
    answers, rewards = drawn(
        questions_of(arguments.prompts), (arguments.seed * 1000 + update) * 1000 + rank, arguments.group
    )
    generated = time.process_time()
    rows = Rows(answers)
    old = rows.aligned([answer.logprobs for answer in answers])
    logits = rows.logits()
    logprobs = exact_logprobs(logits, rows.answers, old)
    loss = grpo_loss(logprobs, old, grpo_advantages(rewards, arguments.group).to(engine.device), rows.mask)
    exact = bool(((logprobs.detach() - old).exp() == 1)[rows.mask].all())
    engine.measure_mismatch(torch_logprobs(logits.detach(), rows.answers), old, rows.mask)  # of a plain forward
    engine.backward(loss)
    engine.step()
    seconds = (generated - begin, 0.0, time.process_time() - generated)
    return seconds, rewards.mean(), f"ratios {'all 1' if exact else 'not 1'}", engine.rollout_mismatch.largest


def pairs_of(count):
    """(better answer, worse answer) of the untrained model to `count` prompts, where their rewards differ."""
    answers, rewards = drawn(questions_of(count), 7 + rank, arguments.group)
    groups = rewards.view(-1, arguments.group)
    best, worst = groups.argmax(1).tolist(), groups.argmin(1).tolist()
    starts = range(0, len(answers), arguments.group)
    pairs = [(answers[at + high], answers[at + low]) for at, high, low in zip(starts, best, worst, strict=True)]
    return [pair for pair, group in zip(pairs, groups, strict=True) if group.max() > group.min()]


def dpo(update):
    """One update by DPO; the reference's log-probabilities are those that the answers were drawn with."""
    begin = time.process_time()
    chosen = [pairs[(update * arguments.prompts + at) % len(pairs)] for at in range(arguments.prompts)]
    answers = [better for better, _ in chosen] + [worse for _, worse in chosen]
    now = scores(answers)
    scored = time.process_time()
    rows = Rows(answers)
    logits = rows.logits()
    values = rows.aligned(now)
    logprobs = exact_logprobs(logits, rows.answers, values)
    gains = torch.where(rows.mask, logprobs - rows.aligned([answer.logprobs for answer in answers]), 0.0).sum(1)
    margins = arguments.beta * (gains[: len(chosen)] - gains[len(chosen) :])
    loss = -F.logsigmoid(margins).mean()
    engine.measure_mismatch(torch_logprobs(logits.detach(), rows.answers), values, rows.mask)
    engine.backward(loss)
    engine.step()
    seconds = (0.0, scored - begin, time.process_time() - scored)
    said = f"loss {loss.item():.6f}, better preferred in {(margins > 0).float().mean():.2f}"
    return seconds, None, said, engine.rollout_mismatch.largest


def questions_of(count):
    """`count` random questions about things to train on."""
    places = torch.randint(len(trained_things) * len(QUESTIONS), (count,), generator=random).tolist()
    return [(trained_things[at // len(QUESTIONS)], QUESTIONS[at % len(QUESTIONS)]) for at in places]


def draw(folder):
    """A picture of all runs in the folder: rewards by update, and the CPU time of an update."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = {path.stem.removeprefix("trained-"): json.loads(path.read_text()) for path in folder.glob("trained-*.json")}
    figure, (curves, times) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=[2, 1])
    for at, (name, run) in enumerate(sorted(runs.items())):
        color = f"C{at}"
        updates, held = zip(*[(each["update"], each["reward"]) for each in run["held_out"]], strict=True)
        curves.plot(updates, held, "o-", color=color, label=f"{name}, held out")
        if run["rewards"]:
            smooth = [mean(run["rewards"][max(0, end - 5) : end]) for end in range(1, len(run["rewards"]) + 1)]
            curves.plot(smooth, color=color, linewidth=1, alpha=0.6, label=f"{name}, answers trained on (mean of 5)")
        bottom = 0.0
        for part, shade in PARTS.items():
            height = mean(run[part] or [0.0])
            times.bar(at, height, bottom=bottom, color=shade, label=part if at == 0 else None)
            if height > 0.2:
                times.text(at, bottom + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=8)
            bottom += height
    curves.set(xlabel="update", ylabel="mean reward", ylim=(0, 1.02), title="Reward")
    curves.grid(alpha=0.3)
    curves.legend(fontsize=7)
    times.set_xticks(range(len(runs)), sorted(runs))
    times.set(ylabel="CPU seconds an update, one rank", title="Where the time goes")
    times.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "trained.png", dpi=110)


tokenizer = AutoTokenizer.from_pretrained(arguments.model)
base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
torch.manual_seed(arguments.seed)
count = base.config.num_hidden_layers
changed = range(max(0, count - arguments.layers), count)
lora = LoraConfig(
    r=arguments.lora,
    lora_alpha=2 * arguments.lora,
    target_modules=MATRICES,
    layers_to_transform=list(changed),
    task_type="CAUSAL_LM",
)
model = get_peft_model(base, lora)
rows = arguments.prompts * (arguments.group if arguments.method == "grpo" else 2)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=[param for param in model.parameters() if param.requires_grad],
    config={
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "AdamW", "params": {"lr": arguments.rate, "weight_decay": 0.0}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": arguments.bf16},
        "zero_optimization": {"stage": arguments.stage},
        "hybrid_engine": {"enabled": True},
        "steps_per_print": 10**9,
    },
)
rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
random = torch.Generator().manual_seed(1000 * arguments.seed + rank)
trained_things, held_out = THINGS[:-HELD_OUT], THINGS[-HELD_OUT:]
folder = Path(arguments.output)
figures = {"method": arguments.method, "rewards": [], "held_out": [], "largest_difference": [], "messages": []}
figures |= {part: [] for part in PARTS} | {"arguments": vars(arguments)}


def record():
    """Look at the held-out things, print and record what is seen."""
    reward, kl = look()
    figures["held_out"].append({"update": engine.global_steps, "reward": over_ranks(reward), "kl": over_ranks(kl)})
    if rank == 0:
        last = figures["held_out"][-1]
        print(f"after {last['update']} updates: held out: reward {last['reward']:.3f}, KL {last['kl']:.4f}", flush=True)
        save()


def save():
    """Write the figures so far, and draw them."""
    figures["cpu_seconds"] = time.process_time()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"trained-{arguments.method}.json").write_text(json.dumps(figures))
    draw(folder)


record()
if arguments.method == "dpo":
    pairs = pairs_of(arguments.pool)
    figures["pairs"] = len(pairs)
for update in range(arguments.updates):
    seconds, reward, said, difference = (grpo if arguments.method == "grpo" else dpo)(update)
    for part, each in zip(PARTS, seconds, strict=True):
        figures[part].append(each)
    figures["messages"].append(said)
    figures["largest_difference"].append(difference)
    if reward is not None:
        figures["rewards"].append(over_ranks(reward))
        said = f"reward {figures['rewards'][-1]:.3f}, {said}"
    if rank == 0:
        times = ", ".join(f"{part} {each:.1f} s" for part, each in zip(PARTS, seconds, strict=True) if each)
        print(f"update {update}: {said}; CPU: {times}; a forward differs by {difference:.2g}", flush=True)
    if (update + 1) % arguments.every == 0 or update + 1 == arguments.updates:
        record()

for thing in held_out[:3]:
    answers, _ = drawn([(thing, QUESTIONS[0])], 2, 1)
    if rank == 0:
        print(f"{QUESTIONS[0].format(thing)} {tokenizer.decode(answers[0].tokens, skip_special_tokens=True)}")
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    if rank == 0:
        model.save_pretrained(folder / f"adapter-{arguments.method}")
        print(f"{folder / 'trained.png'}; {time.process_time():.0f} s of CPU on rank 0")
engine.destroy()
