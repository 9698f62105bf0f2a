"""What a run on two hosts says by itself, and what a bundle of it holds."""

from __future__ import annotations

import json
import sys
import zipfile

import pytest

from tests.hosts.runs import need_hosts

need_hosts()

TRAIN = """
    import os, torch, deepspeed
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "zero_optimization": {"stage": int(os.environ["STAGE"])}}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for step in range(20):
        loss = engine(torch.randn(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("kept")
    engine.destroy()
    if os.environ["RANK"] == "0":
        os.write(1, b"trained\\n")
"""
GIVEN = {"A_TOKEN": "of-the-command-line", "B_KEY": "of-the-home", "C_PASSWORD": "of-h1-alone"}
TELL = f"""
    import os, socket
    names = {list(GIVEN)!r}
    for name in names:  # as a careless script prints them: without their names
        print("given", os.environ.get(name, "nothing"))
    print("on", socket.gethostname(), dict(os.environ), flush=True)
    raise ValueError(os.environ.get("C_PASSWORD"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("by", ["ssh", "openmpi"])
def test_a_run_says_ten_lines_at_most(runs, stage, by):
    """Launcher, engine and libraries together: everything but the script's own line."""
    done = runs.to_end(TRAIN, "--export", f"STAGE={stage}", by=by)
    assert done.code == 0, done.err
    assert done.out == "trained\n"
    lines = done.err.splitlines()
    assert 1 <= len(lines) <= 10, done.err
    assert any("4 rank(s) on 2 host(s)" in line for line in lines)


@pytest.mark.slow
def test_a_bundle_of_two_hosts_holds_no_secret(runs):
    """Secrets that were given by the command line and by the home's file, for all hosts and for one."""
    home = runs.folder / "home"
    home.mkdir()
    runs.environment |= {"HOME": str(home), "TMPDIR": str(runs.folder)}
    (home / ".deepspeed_env").write_text(f"B_KEY={GIVEN['B_KEY']}\nC_PASSWORD@h1='{GIVEN['C_PASSWORD']}'\n")
    secret = ["--export", f"A_TOKEN={GIVEN['A_TOKEN']}"]
    done = runs.to_end(TELL, *secret, "--enable_each_rank_log", "logs")
    assert done.code == 1 and "given of-h1-alone" in done.out
    bundle = [sys.executable, "-m", "deepspeed.launcher.bundle", "-o", "out.zip", "-l", "logs", "hostfile", "train.py"]
    made = runs.run(bundle)
    said, err = made.communicate(timeout=120)
    assert made.returncode == 0, said + err
    with zipfile.ZipFile(runs.folder / "out.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {f"logs/attempt0/rank{rank}.log" for rank in range(4)} <= texts.keys()
    assert "on h0" in texts["logs/attempt0/rank0.log"] and "on h1" in texts["logs/attempt0/rank3.log"]
    assert json.loads(texts["report.json"])["software"]["deepspeed"]
    shown = {name: [value for value in GIVEN.values() if value in text] for name, text in texts.items()}
    assert not any(shown.values()), shown
