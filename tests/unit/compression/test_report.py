"""`ds_compress report`: what an exported folder is beside the dense one, told by processes without this package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspeed.compression.cli import main
from deepspeed.compression.compare import Exported, report
from deepspeed.compression.export import export
from deepspeed.compression.pruning.layer_selection import keep_layers
from deepspeed.compression.pruning.verify import build
from deepspeed.errors import CompressionError
from tests.unit.compression.architectures import architecture


def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The dense model's, and that of the same model with half of its layers."""
    made = []
    for name in ("dense", "small"):
        model = build(*architecture("Llama"))
        if name == "small":
            model = keep_layers(model, "model.layers", [0])
        made.append(tmp_path / name)
        export(model, model.state_dict(), made[-1])
    return made[0], made[1]


@pytest.mark.slow
def test_a_folder_is_compared_with_the_dense_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, small = folders(tmp_path)
    windows = torch.randint(0, 60, (20, 17), generator=torch.Generator().manual_seed(0))
    torch.save(windows, tmp_path / "held.pt")
    assert main(["report", str(dense), str(small), "--tokens", str(tmp_path / "held.pt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"][1] < told["parameters"][0] and told["bytes"][1] < told["bytes"][0]
    model = build(*architecture("Llama"))
    with torch.no_grad():
        logits = model(input_ids=windows[:, :-1]).logits
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert told["loss"][0] == pytest.approx(wanted.item(), rel=1e-5) and told["loss"][1] != told["loss"][0]
    assert told["prefill"] > 0 and told["token"] > 0


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompressionError, match=r"config\.json"):
        report(tmp_path, tmp_path)
    (tmp_path / "held.pt").write_text("no tensor")
    assert main(["report", "a", "b", "--tokens", str(tmp_path / "held.pt")]) == 1
    torch.save(torch.rand(3, 4), tmp_path / "held.pt")
    assert main(["report", "a", "b", "--tokens", str(tmp_path / "held.pt")]) == 1
    assert "no tensor of torch.save" in (told := capsys.readouterr().err) and "integers of shape" in told


@pytest.mark.slow
def test_learned_positions_end_where_the_windows_do(tmp_path: Path) -> None:
    model_class, config = architecture("GPT2")
    config.n_positions = 16
    model = build(model_class, config)
    export(model, model.state_dict(), tmp_path)
    told = report(tmp_path, tmp_path, torch.randint(0, 60, (2, 17)))
    assert told["loss"][0] == told["loss"][1] and told["token"] > 0


@pytest.mark.slow
def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CompressionError, match="cannot be read by plain Transformers"):
        Exported(tmp_path)


@pytest.mark.slow
def test_a_folder_that_lacks_a_weight_is_not_judged_by_random_ones(tmp_path: Path) -> None:
    model = build(*architecture("Llama"))
    export(model, model.state_dict(), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompressionError, match=r"weights are missing.*model\.norm\.weight"):
        Exported(tmp_path)


@pytest.mark.slow
def test_bytes_of_an_old_folder_are_those_of_its_pickled_weights(tmp_path: Path) -> None:
    model = build(*architecture("Llama"))
    export(model, model.state_dict(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with Exported(tmp_path) as read:
        assert read.bytes == (tmp_path / "pytorch_model.bin").stat().st_size


def test_a_reader_that_hangs_is_ended(tmp_path: Path) -> None:
    model = build(*architecture("Llama"))
    export(model, model.state_dict(), tmp_path)
    with pytest.raises(CompressionError, match=r"no answer within 0\.2 s"):
        Exported(tmp_path, limit=0.2)
