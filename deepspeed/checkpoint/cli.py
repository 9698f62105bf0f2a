"""Command `ds_checkpoint`: list, verify, compare and export checkpoints."""

from __future__ import annotations

import argparse
import datetime
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from deepspeed.checkpoint.compat.zero_to_fp32 import in_dtype, open_source, rows_of
from deepspeed.checkpoint.format import filesystem
from deepspeed.checkpoint.format.manifest import LEFT_OUT, read_manifest, state_field
from deepspeed.checkpoint.format.safetensors_file import TensorFile
from deepspeed.checkpoint.huggingface import write_sharded
from deepspeed.checkpoint.load.directory import look, place_of, read_latest, tags_of
from deepspeed.checkpoint.load.reader import NativeSource, Source
from deepspeed.errors import CheckpointCorruptError, CheckpointError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "as-saved": None}


def list_tags(folder: Path) -> Iterator[str]:
    """Yield a line of text for each tag of a folder; `*` marks the tag in `latest`."""
    latest = read_latest(folder, filesystem.LATEST)
    for tag in tags_of(folder):
        seen, path = look(folder, tag), place_of(folder, tag)
        mark = "*" if tag == latest else " "
        if seen.kind != "native":
            yield f"{mark} {tag}: {'in upstream layout' if seen.kind else 'broken: ' + seen.problem}"
            continue
        manifest = read_manifest(path)
        about, size = manifest.about, sum(seal.nbytes for seal in manifest.files.values())
        when = datetime.datetime.fromtimestamp(about["saved_at"] / 1e9).isoformat(" ", "seconds")
        parameters = sum(row.numel for row in manifest.rows)
        absent = f", MISSING {', '.join(sorted(seen.absent))}" if seen.absent else ""
        yield (
            f"{mark} {tag}: step {about['global_steps']}, {when}, {parameters:,} elements, {size / 2**20:.1f} MiB, "
            f"stage {about['stage']} {about['precision']} on {about['ranks']} rank(s){absent}"
        )


def verify(path: Path) -> Iterator[str]:
    """Read every byte of the native checkpoint in the folder of a tag, and yield a line for each defective file."""
    try:
        manifest = read_manifest(path)
    except CheckpointCorruptError as error:
        yield str(error)
        return
    for name, seal in sorted(manifest.files.items()):
        try:
            if name.endswith(".safetensors"):
                with TensorFile(path / name, seal) as file:
                    file.verify()
            else:
                data = (path / name).read_bytes()
                if (len(data), zlib.crc32(data)) != (seal.nbytes, seal.crc32):
                    yield f"{path / name} differs from what was written"
        except (CheckpointCorruptError, OSError) as error:
            yield str(error)


def differences(first: Source, other: Source) -> Iterator[str]:
    """Yield a line of text for each difference between two checkpoints, which may be sharded differently.

    Names, shapes and values of parameters and buffers, and optimizer state of the parameter's shape, are compared.
    """
    ours, other_rows = ({row.name: row for row in source.manifest.rows} for source in (first, other))
    for name in sorted(ours.keys() ^ other_rows.keys()):
        yield f"{name}: only in {first.path if name in ours else other.path}"
    for name in sorted(ours.keys() & other_rows.keys()):
        if ours[name].shape != other_rows[name].shape:
            yield f"{name}: {ours[name].shape} and {other_rows[name].shape}"
            continue
        states = [source.manifest.state_of(rows[name]) for source, rows in ((first, ours), (other, other_rows))]
        keys = [set(state.sliced) if state is not None else set() for state in states]
        if keys[0] != keys[1]:
            yield f"{name}: optimizer state {sorted(keys[0])} and {sorted(keys[1])}"
        stored = [source for source, rows in ((first, ours), (other, other_rows)) if rows[name].kind != LEFT_OUT]
        if len(stored) == 1:
            yield f"{name}: values only in {stored[0].path}"
        fields = ["value"] if len(stored) == 2 else []
        for field in [*fields, *(state_field(key) for key in sorted(keys[0] & keys[1]))]:
            a, b = first.whole(name, field), other.whole(name, field)
            wrong = (a != b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a != b
            if count := int(wrong.sum()):
                yield f"{name} {field}: {count} of {a.numel()} elements differ"


def export(source: Source, folder: Path, kind: str, dtype: torch.dtype | None, limit: str) -> list[Path]:
    """Write the weights of a checkpoint to files for other libraries.

    Args:
        source: the checkpoint.
        folder: folder for the files; created if missing.
        kind: `hf`: safetensors and config.json; `torch`: a state dict by `torch.save`.
        dtype: dtype of floating-point weights; None: no conversion.
        limit: maximum size of a file, such as "5GB".

    Returns:
        Paths of the written files.
    """
    state = {row.name: in_dtype(source.whole(row.name), dtype) for row in rows_of(source, False)}
    state |= {alias: state[name] for alias, name in source.manifest.aliases.items() if name in state}
    written = write_sharded(state, folder, limit, safe=kind == "hf")
    config = source.manifest.about.get("model_config")
    if kind == "hf" and config is not None:
        (folder / "config.json").write_text(config)
        written.append(folder / "config.json")
    return written


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_checkpoint", description="List, verify, compare and export checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("ls", help="the checkpoints of a folder; * is what loading without a tag takes")
    checking = commands.add_parser("verify", help="read every byte and compare checksums")
    comparing = commands.add_parser("diff", help="compare two checkpoints, whatever topology they were saved on")
    exporting = commands.add_parser("export", help="write the weights for other libraries")
    for command in (listing, checking, exporting):
        command.add_argument("folder", type=Path, help="folder of checkpoints, or of one tag")
    for name in ("one", "other"):
        comparing.add_argument(name, type=Path, help="folder of checkpoints, or of one tag")
    for command in (checking, exporting):
        command.add_argument("-t", "--tag", help="which; default: the latest")
    exporting.add_argument("output", type=Path)
    exporting.add_argument("--to", choices=("hf", "torch"), default="hf", help="safetensors, or a torch state dict")
    exporting.add_argument("--dtype", choices=_DTYPES, default="as-saved")
    exporting.add_argument("--max-shard-size", default="5GB")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run `ds_checkpoint`.

    Args:
        arguments: command line without the program's name; None: `sys.argv`.

    Returns:
        Exit code: 0, or 1 after an error, a defect or a difference.
    """
    options = _arguments().parse_args(arguments)
    try:
        if options.command == "ls":
            lines = list(list_tags(options.folder))
            print("\n".join(lines) or f"no checkpoints in {options.folder}")
            return 0
        if options.command == "diff":
            difference_lines = list(differences(open_source(options.one), open_source(options.other)))
            print("\n".join(difference_lines) or "equal")
            return 1 if difference_lines else 0
        source = open_source(options.folder, options.tag)
        if options.command == "export":
            for path in export(source, options.output, options.to, _DTYPES[options.dtype], options.max_shard_size):
                print(path)
            return 0
        if not isinstance(source, NativeSource):
            raise CheckpointError(f"{source.path} is in upstream's layout, which has no checksums to verify")
        problems = list(verify(source.path))
        print("\n".join(problems) or f"{source.path}: every byte is as it was written")
        return 1 if problems else 0
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
