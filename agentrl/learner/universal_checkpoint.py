"""Loads a checkpoint that was written with a different number of ranks or a different ZeRO stage.

This module uses DeepSpeed's universal format: a folder per parameter with its unsharded float32 weights, two moments and step count.
DeepSpeed converts checkpoints of stages 1 to 3 to this format and loads it into engines of those stages. This module splits and joins the
single file of stage 0. This module also adds what DeepSpeed 0.19.8 lacks for a change of stage: stage 3's step counts, and the file names
and headers of the new stage.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import LearnerError
from agentrl.learner.ranks import Ranks

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # read by torch at each load; it overrides a caller's weights_only=False


@contextmanager
def tensors_only(what: str) -> Iterator[None]:
    """Within the block, every `torch.load` of this process and its children accepts only tensors and plain values.

    Raises `LearnerError`, whose message includes `what`, if a file contains anything else.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    except pickle.UnpicklingError as error:
        raise LearnerError(
            f"{what} contains objects other than tensors and plain values ({_first_line(error)}); none of its code was run\n"
            "  fix: resume from a checkpoint that this run wrote"
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def read(path: Path) -> Any:
    """Returns the contents of a file, with tensors on the CPU. Use inside `tensors_only`."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _first_line(error: Exception) -> str:
    """Returns the first relevant line of torch's message, without its advice to load the file with pickle."""
    lines = [line.strip() for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (lines or [type(error).__name__])[0][:300]


_MOMENTS = ("exp_avg", "exp_avg_sq")
_PARAM = "param"  # DeepSpeed's key for the tensor in each of these files


def layout(stage: int) -> str:
    """Returns the file layout of a ZeRO stage; stages with the same layout can read each other's files."""
    return {0: "whole", 3: "weights"}.get(stage, "states")


def layout_of(folder: Path) -> str:
    """Returns the file layout in which a checkpoint folder was written."""
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        return "weights"
    return "states" if any(folder.glob("*_optim_states.pt")) else "whole"


def load_converted(engine: Any, folder: Path, tag: str, ranks: Ranks) -> None:
    """Loads `folder/tag` into a DeepSpeed engine of any stage, by converting it in a temporary folder. Use inside `tensors_only`.

    Raises `LearnerError` if the checkpoint cannot be converted or has different parameters.
    """
    whole = folder.with_name(f".{folder.name}.whole")
    problem: str | None = None
    try:
        if ranks.is_first:
            shutil.rmtree(whole, ignore_errors=True)
            problem = _to_universal(folder / tag, whole / tag, engine)
        if ranks.from_first(int(problem is not None)):
            raise LearnerError(
                f"checkpoint {folder} cannot be converted to a different ZeRO stage or number of ranks: {problem or 'see rank 0'}"
            )
        _from_universal(engine, whole, tag)
        ranks.barrier()
    finally:
        if ranks.is_first:
            shutil.rmtree(whole, ignore_errors=True)


def _to_universal(source: Path, target: Path, engine: Any) -> str | None:
    """Converts a checkpoint folder to the universal format for `engine`. Returns None, or the reason why that is impossible."""
    target.mkdir(parents=True)
    kind = layout_of(source)
    headers = sorted(source.glob("*_model_states.pt"))[0]
    problem = _split(read(headers), target / "zero", engine) if kind == "whole" else _convert(source, target, kind)
    if problem is not None:
        return problem
    expected = {name for names in _names(engine) for name in names}
    missing = sorted(name for name in expected if not (target / "zero" / name / "fp32.pt").is_file())
    if missing:
        return f"it has no {missing[0]}; resume with the model and the critic of the run that wrote it"
    for name in expected:
        _complete(target / "zero" / name)
    header = {key: value for key, value in read(headers).items() if key not in ("module", "optimizer")}
    torch.save(header, target / Path(engine._get_ckpt_name("", "", pp_placeholder="0")).name)
    _write_common(target / "zero" / "optimizer_state.pt", len(_names(engine)))
    return None


def _split(saved: dict[str, Any], target: Path, engine: Any) -> str | None:
    """Splits the file of a stage 0 checkpoint into the folders of the universal format. The checkpoint's optimizer numbers the parameters
    in the same order as `engine`."""
    groups, names_of = saved["optimizer"]["param_groups"], _names(engine)
    if [len(group["params"]) for group in groups] != [len(names) for names in names_of]:
        return "its optimizer has different parameter groups; resume with the learner.weight_decay and the critic of the run that wrote it"
    for group, names in zip(groups, names_of, strict=True):
        for number, name in zip(group["params"], names, strict=True):
            state = saved["optimizer"]["state"].get(number, {})
            _write(target / name, saved["module"][name].float(), {moment: state[moment] for moment in _MOMENTS if state})
            if state:
                torch.save(state["step"], target / name / "step.pt")
    return None


def _convert(source: Path, target: Path, kind: str) -> str | None:
    from deepspeed.checkpoint import ds_to_universal

    optimizers = sorted(source.glob("*_optim_states.pt"))
    if kind == "weights" and not read(optimizers[0])["optimizer_state_dict"]["optimizer_state_dict"]["state"]:
        return "its optimizer took no step; resume with the ranks and the learner.zero_stage of the run that wrote it"
    arguments = SimpleNamespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(sys.stderr):
        ds_to_universal.main(arguments)
    for written in target.glob("*_model_states.pt"):  # in the old stage's layout
        written.unlink()
    if kind == "weights":
        _add_steps(optimizers[0], sorted(source.glob("*_model_states.pt"))[0], target / "zero")
    return None


def _add_steps(optimizer: Path, model: Path, target: Path) -> None:
    """Adds the step counts, which the converter omits at stage 3: one per parameter group."""
    states = read(optimizer)["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    for number, shapes in enumerate(read(model)["param_shapes"]):
        for name in shapes:
            torch.save(states[number]["step"], target / name / "step.pt")


def _complete(folder: Path) -> None:
    """Completes the folder of a parameter: adds zero moments and a step count of 0 if they are missing, and rewrites the other files in one
    format."""
    weights = _tensor(folder / "fp32.pt")
    moments = {moment: _tensor(folder / f"{moment}.pt") for moment in _MOMENTS if (folder / f"{moment}.pt").is_file()}
    _write(folder, weights, {moment: moments.get(moment, torch.zeros_like(weights)) for moment in _MOMENTS})
    if not (folder / "step.pt").is_file():
        torch.save(torch.zeros(()), folder / "step.pt")


def _write_common(path: Path, groups: int) -> None:
    """Writes the common header with empty parameter groups, because DeepSpeed would apply the first group's options to all groups."""
    import deepspeed

    common = {
        "ds_version": deepspeed.__version__,
        "param_groups": [{} for _ in range(groups)],
        "optimizer_state_dict": {"state": {0: {"step": torch.zeros(())}}, "param_groups": [{}]},
    }
    torch.save(common, path)


def _from_universal(engine: Any, whole: Path, tag: str) -> None:
    if not engine.zero_optimization():
        _load_whole(engine, whole / tag / "zero")
        return
    engine._config.load_universal_checkpoint = True
    try:
        loaded, _ = engine.load_checkpoint(str(whole), tag=tag)
    finally:
        engine._config.load_universal_checkpoint = False
    if loaded is None:
        raise LearnerError(f"DeepSpeed loaded nothing from {whole / tag}")
    if engine.zero_optimization_partition_weights():  # DeepSpeed sets the same count in all groups
        optimizer = engine.optimizer
        for flat, members in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            step = read(whole / tag / "zero" / engine.param_names[members[0]] / "step.pt")
            optimizer.optimizer.state[flat]["step"] = step


@torch.no_grad()
def _load_whole(engine: Any, folder: Path) -> None:
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            own = folder / engine.param_names[parameter]
            parameter.copy_(_tensor(own / "fp32.pt").view_as(parameter))
            state = {moment: _tensor(own / f"{moment}.pt").view_as(parameter).to(parameter.device) for moment in _MOMENTS}
            engine.optimizer.state[parameter] = {"step": read(own / "step.pt"), **state}


def _names(engine: Any) -> list[list[str]]:
    """Returns the names of the trained parameters of each optimizer group, in order."""
    optimizer = engine.optimizer
    if not engine.zero_optimization():
        groups: Iterator[Any] = (group["params"] for group in optimizer.param_groups)
    elif engine.zero_optimization_partition_weights():
        owners = [optimizer.sub_group_to_group_id[number] for number in range(len(optimizer.fp16_groups))]
        members: list[list[Any]] = [[] for _ in range(max(owners) + 1)]
        for owner, parameters in zip(owners, optimizer.fp16_groups, strict=True):
            members[owner] += parameters
        groups = iter(members)
    else:
        groups = iter(optimizer.bit16_groups)
    return [[engine.param_names[parameter] for parameter in group] for group in groups]


def _write(folder: Path, weights: Tensor, moments: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in (("fp32", weights), *moments.items()):
        torch.save({_PARAM: tensor.clone()}, folder / f"{name}.pt")


def _tensor(path: Path) -> Tensor:
    saved = read(path)
    tensor: Tensor = saved[_PARAM] if isinstance(saved, dict) else saved
    return tensor
