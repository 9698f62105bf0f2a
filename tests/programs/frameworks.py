"""Training frameworks as they are: their command lines and their own DeepSpeed JSONs, two CPU ranks, tiny local models.

Run it with the interpreter of an environment that has the framework (one each, as docs/clients.md says):

    ENV/bin/python tests/programs/frameworks.py llamafactory --sources LLaMA-Factory --stages 2 3
    ENV/bin/python tests/programs/frameworks.py swift --deepspeed FOLDER   # another deepspeed, `pip install --target`

`--sources` is a checkout of the framework's repository, for what its package leaves out (JSONs, scripts). Prints a row
of JSON for each stage, and writes it to `--results FOLDER` (`run.py --page` reads the folder `results/frameworks`).
Stage 0 of sentence_transformers is one process without DeepSpeed. A framework that is not installed is skipped by name.
The models that it makes lie in the folder `FRAMEWORK_MODELS`. Nothing of a framework is edited: what it finds instead
of CUDA is in `on_cpu/sitecustomize.py`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ON_CPU = REPOSITORY / "tests/programs/on_cpu"
STEPS, LIMIT_S = 4, 1500
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def sentences(count: int) -> list[tuple[str, str]]:
    """Questions and answers, the same at every call."""
    draw = random.Random(0)
    return [
        (f"add {a} and {b}", f"{a + b}") for a, b in ((draw.randrange(99), draw.randrange(99)) for _ in range(count))
    ]


MODELS = Path(os.environ.get("FRAMEWORK_MODELS") or Path(tempfile.gettempdir(), "framework-models"))


def made_once(make: Callable[[Path], object]) -> Path:
    """The folder in which `make` has put a model, now or for another framework or stage."""
    place = MODELS / make.__name__
    if not place.exists():
        unfinished = place.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(unfinished)
        unfinished.rename(place)
    return place


def weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Random values by name, with neither torch nor the framework: matrices small, biases 0, scales of norms 1."""
    import numpy
    from safetensors.numpy import save_file

    draw = numpy.random.default_rng(0)

    def values(name: str, shape: tuple[int, ...]) -> Any:
        if len(shape) > 1:
            return draw.normal(0, 0.02, shape).astype(numpy.float32)
        return numpy.full(shape, 0.0 if name.endswith("bias") else 1.0, numpy.float32)

    save_file({name: values(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip


def language_model(folder: Path) -> None:
    """A Qwen2 of two layers with random weights in float32, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT}
    tokens |= {"additional_special_tokens": ["<|im_start|>"], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    wide, inner, heads, kept = 64, 128, 4, 2
    config: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": len(words)}
    config |= {"hidden_size": wide, "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": heads}
    config |= {"num_key_value_heads": kept, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "tie_word_embeddings": False}))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(words), wide), "model.norm.weight": (wide,)}
    for number in range(2):
        layer, out = f"model.layers.{number}.", {"q": wide, "k": wide * kept // heads, "v": wide * kept // heads}
        for name, rows in out.items():
            shapes |= {
                f"{layer}self_attn.{name}_proj.weight": (rows, wide),
                f"{layer}self_attn.{name}_proj.bias": (rows,),
            }
        shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, wide) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (wide, inner), f"{layer}self_attn.o_proj.weight": (wide, wide)}
        shapes |= {f"{layer}{name}_layernorm.weight": (wide,) for name in ("input", "post_attention")}
    weights(folder, shapes | {"lm_head.weight": (len(words), wide)})


def llamafactory(folder: Path, stage: int, sources: Path) -> list[str]:
    texts = [{"instruction": question, "input": "", "output": answer} for question, answer in sentences(64)]
    (folder / "sums.json").write_text(json.dumps(texts))
    (folder / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json"}}))
    # The keys are those of examples/train_full/qwen3_full_sft.yaml; JSON is YAML.
    settings = {
        "model_name_or_path": str(made_once(language_model)),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "deepspeed": str(sources / f"examples/deepspeed/ds_z{stage}_config.json"),
        "dataset": "sums",
        "dataset_dir": str(folder),
        "template": "qwen",
        "cutoff_len": 128,
        "output_dir": str(folder / "out"),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "bf16": False,
        "ddp_timeout": 1800,
    }
    (folder / "sft.yaml").write_text(json.dumps(settings))
    return [str(Path(sys.executable).parent / "llamafactory-cli"), "train", str(folder / "sft.yaml")]


def swift(folder: Path, stage: int, sources: Path) -> list[str]:
    lines = ({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
             for question, answer in sentences(64))  # fmt: skip
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [str(Path(sys.executable).parent / "swift"), "sft", "--model", str(made_once(language_model))]
    command += ["--model_type", "qwen2", "--template", "qwen", "--dataset", str(folder / "sums.jsonl")]
    command += ["--deepspeed", f"zero{stage}", "--tuner_type", "full", "--torch_dtype", "float32"]
    command += ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-3"]
    command += ["--max_steps", str(STEPS), "--logging_steps", "1", "--max_length", "128", "--attn_impl", "eager"]
    command += ["--output_dir", str(folder / "out"), "--report_to", "none", "--split_dataset_ratio", "0"]
    return [*command, "--dataloader_num_workers", "0", "--dataset_num_proc", "1"]


def axolotl(folder: Path, stage: int, sources: Path) -> list[str]:
    texts = [{"instruction": question, "input": "", "output": answer} for question, answer in sentences(64)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    settings = {
        "base_model": str(made_once(language_model)),
        "datasets": [{"path": str(folder / "sums.jsonl"), "ds_type": "json", "type": "alpaca"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "val_set_size": 0,
        "output_dir": str(folder / "out"),
        "sequence_len": 256,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "optimizer": "adamw_torch",
        "learning_rate": 1e-3,
        "lr_scheduler": "cosine",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "logging_steps": 1,
        "save_steps": STEPS,
        "seed": 42,
        "deepspeed": str(sources / f"deepspeed_configs/zero{stage}.json"),
    }
    (folder / "sft.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port()]
    return [*command, "--multi_gpu", "-m", "axolotl.cli.train", str(folder / "sft.yaml")]


def encoder_model(folder: Path) -> None:
    """A BERT of two layers whose matrices have more elements than those that stage 3 leaves whole, without dropout."""
    from tokenizers import BertWordPieceTokenizer

    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "add", "and", *letters, *(f"##{one}" for one in letters)]
    BertWordPieceTokenizer({word: at for at, word in enumerate(words)}).save(str(folder / "tokenizer.json"))
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokens |= {"mask_token": "[MASK]", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    wide = 320
    config: dict[str, Any] = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": len(words)}
    config |= {"hidden_size": wide, "intermediate_size": wide, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(config))
    rows = {"word": len(words), "position": 128, "token_type": 2}
    shapes: dict[str, tuple[int, ...]] = {f"embeddings.{name}_embeddings.weight": (n, wide) for name, n in rows.items()}
    norms, layers = ["embeddings.LayerNorm"], ["pooler.dense"]
    for number in range(2):
        layer = f"encoder.layer.{number}."
        norms += [f"{layer}{name}output.LayerNorm" for name in ("attention.", "")]
        layers += [f"{layer}attention.self.{name}" for name in ("query", "key", "value")]
        layers += [f"{layer}{name}.dense" for name in ("attention.output", "intermediate", "output")]
    for name in norms + layers:
        shapes |= {f"{name}.weight": (wide, wide) if name in layers else (wide,), f"{name}.bias": (wide,)}
    weights(folder, shapes)


def sentence_transformers(folder: Path, stage: int, sources: Path) -> list[str]:
    """Two ranks' batches are those of one process that accumulates two."""
    pairs = "".join(json.dumps({"anchor": one, "positive": other}) + "\n" for one, other in sentences(64))
    (folder / "pairs.jsonl").write_text(pairs)
    command = [sys.executable]
    if stage:
        config_file = REPOSITORY / f"tests/clients/launch/zero{stage}.yaml"
        command += ["-m", "accelerate.commands.launch", "--config_file", str(config_file)]
        command += ["--main_process_port", free_port()]
    script, out = str(REPOSITORY / "tests/programs/embed.py"), ["--output", str(folder / "out")]
    command += [script, "--model", str(made_once(encoder_model)), *out]
    command += ["--steps", str(STEPS), "--accumulate", "1" if stage else "2", "--texts", str(folder / "pairs.jsonl")]
    return ["sh", "-c", f"{shlex.join(command)} && {shlex.join([sys.executable, script, '--encode', *out])}"]


def picture_model(folder: Path) -> None:
    """A Stable Diffusion pipeline with random weights, small enough for a test."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "words").mkdir(parents=True)
    (folder / "words" / "vocab.json").write_text(json.dumps({word: at for at, word in enumerate(words)}))
    (folder / "words" / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(
        str(folder / "words" / "vocab.json"), str(folder / "words" / "merges.txt"), model_max_length=16
    )
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    text = CLIPTextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, **ends)  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(64, 128), layers_per_block=1, cross_attention_dim=32, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(32, 64), latent_channels=4, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip
    StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text), tokenizer=tokenizer, unet=unet, scheduler=DDPMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,  # pyright: ignore
    ).save_pretrained(folder)  # fmt: skip


def pictures(folder: Path) -> Path:
    """Random pictures of 16 × 16 with a caption each."""
    import numpy
    from PIL import Image

    (folder / "pictures").mkdir()
    lines, draw = [], numpy.random.default_rng(0)
    for number in range(32):
        Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=numpy.uint8)).save(folder / f"pictures/{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": random.Random(number).choice(["a cat", "dog"])}))
    (folder / "pictures" / "metadata.jsonl").write_text("\n".join(lines))
    return folder / "pictures"


def unconditional(folder: Path, stage: int, sources: Path) -> list[str]:
    """Rank 0 alone draws samples and saves, with parameters of the engine, while the other has ended its groups."""
    pictures(folder)
    blocks = {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
    sizes = {"sample_size": 16, "block_out_channels": [64, 128], "layers_per_block": 1, "attention_head_dim": 8}
    config = {"_class_name": "UNet2DModel", "in_channels": 3, "out_channels": 3, **sizes, **blocks}
    (folder / "config.json").write_text(json.dumps(config))
    launch = str(REPOSITORY / f"tests/clients/launch/zero{stage}.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launch]
    command += ["--main_process_port", free_port()]
    command += [str(sources / "examples/unconditional_image_generation/train_unconditional.py")]
    command += ["--train_data_dir", str(folder / "pictures"), "--model_config_name_or_path", str(folder)]
    command += ["--resolution", "16", "--train_batch_size", "4", "--num_epochs", "1", "--ddpm_num_inference_steps", "2"]
    return [*command, "--lr_warmup_steps", "0", "--eval_batch_size", "2", "--output_dir", str(folder / "out")]


def diffusers(folder: Path, stage: int, sources: Path) -> list[str]:
    pictures(folder)
    shared = (REPOSITORY / f"tests/clients/launch/zero{stage}.yaml").read_text()
    # As diffusers' pages have it: its text encoder and autoencoder are not to be born sharded.
    config = folder / "launch.yaml"
    config.write_text(shared.replace("zero3_init_flag: true", "zero3_init_flag: false"))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--main_process_port", free_port(), str(sources / "examples/text_to_image/train_text_to_image.py")]
    command += ["--pretrained_model_name_or_path", str(made_once(picture_model)), "--resolution", "16"]
    command += ["--train_data_dir", str(folder / "pictures"), "--image_column", "image", "--caption_column", "text"]
    command += ["--train_batch_size", "2", "--max_train_steps", str(STEPS), "--learning_rate", "1e-3", "--seed", "3"]
    return [*command, "--lr_warmup_steps", "0", "--output_dir", str(folder / "out"), "--report_to", "tensorboard"]


FRAMEWORKS: dict[str, tuple[str, Callable[[Path, int, Path], list[str]]]] = {
    "llamafactory": ("llamafactory", llamafactory),
    "swift": ("ms-swift", swift),
    "axolotl": ("axolotl", axolotl),
    "diffusers": ("diffusers", diffusers),
    "diffusers-unconditional": ("diffusers", unconditional),
    "sentence_transformers": ("sentence-transformers", sentence_transformers),
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def losses(out: Path) -> list[float]:
    """One a step: of the last `trainer_state.json`, or of TensorBoard's file."""
    states = sorted(out.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    if states:
        return [entry["loss"] for entry in json.loads(states[-1].read_text())["log_history"] if "loss" in entry]
    found: list[float] = []
    for path in out.rglob("events.out.tfevents*"):
        from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
            EventAccumulator,
        )

        events = EventAccumulator(str(path))
        events.Reload()
        for name in {"train_loss", "loss"} & set(events.Tags()["scalars"]):
            found = [event.value for event in events.Scalars(name)]
    return found


def ran(name: str, stage: int, sources: Path, deepspeed: Path, log: Path) -> dict[str, Any]:
    """A row: what ran, with which versions, how it ended, and the losses."""
    package, prepare = FRAMEWORKS[name]
    row: dict[str, Any] = {"framework": package, "version": importlib.metadata.version(package), "stage": stage}
    row["deepspeed"] = "this" if deepspeed == REPOSITORY else str(deepspeed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = prepare(folder, stage, sources.resolve())
        paths = [str(ON_CPU), str(deepspeed)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": free_port(),
        }
        environment |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "HF_HOME": str(folder / "home")}
        environment |= {"HF_HUB_OFFLINE": "1", "MODELSCOPE_CACHE": str(folder / "home"), "AXOLOTL_DO_NOT_TRACK": "1"}
        environment["DS_ACCELERATOR"] = "cpu"
        if deepspeed != REPOSITORY:  # it counts ranks by its launcher's variable, and compiles what ranks meet with
            environment |= {"LOCAL_SIZE": "2", "CXX": "g++", "TORCH_EXTENSIONS_DIR": str(deepspeed / "extensions")}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        row["command"] = " ".join(command).replace(str(folder), ".").replace(str(MODELS), "models")
        with log.open("w") as output:
            started = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                row["ended"] = started.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGTERM)  # torchrun then ends its ranks
                row["ended"] = f"still running after {LIMIT_S} s"
                started.wait()
        embedding = folder / "out" / "embedding.json"
        row["embedding"] = json.loads(embedding.read_text()) if embedding.exists() else None
        return row | {"losses": losses(folder / "out"), "error": last_error(log.read_text(errors="replace"))}


def last_error(text: str) -> str:
    """The last line that names an error."""
    launchers = ("ChildFailedError", "CalledProcessError")  # say only that a rank has failed
    lines = [line.strip() for line in text.splitlines() if "Error" in line and ": " in line]
    lines = [line for line in lines if not any(name in line for name in launchers)]
    return lines[-1][:300] if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--sources", type=Path, default=Path(), help="a checkout of the framework's repository")
    parser.add_argument("--deepspeed", type=Path, default=REPOSITORY, help="a folder that has another deepspeed")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--results", type=Path, help="a folder for the rows")
    options = parser.parse_args()
    if find_spec(options.framework.partition("-")[0]) is None:
        print(f"{options.framework}: skipped, not installed in {sys.prefix}")
        return 0
    runpy.run_path(str(ON_CPU / "sitecustomize.py"))  # this process makes the models with the framework's libraries
    failed = 0
    for stage in options.stages:
        name = f"{options.framework}-{stage}-{'here' if options.deepspeed == REPOSITORY else 'reference'}"
        row = ran(options.framework, stage, options.sources, options.deepspeed, options.logs / f"{name}.log")
        if options.results is not None:
            options.results.mkdir(parents=True, exist_ok=True)
            (options.results / f"{name}.json").write_text(json.dumps(row))
        failed += row["ended"] != 0 or len(row["losses"]) < 2
        print(json.dumps(row), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
