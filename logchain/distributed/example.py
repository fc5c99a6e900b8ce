"""A hidden Markov model fitted to one sequence of ten million steps, whose ranks may die and begin again.

    torchrun --nproc-per-node 2 --max-restarts 1 -m logchain.distributed.example

Each rank reads its own part of the sequence from a memory map, and all of them compute the log-likelihood together.
After every iteration the parameters are saved; when a rank dies, torchrun starts all of them again, and they go on from
the last ones that were saved. `--kill 3` kills the last rank in the third iteration, the first time: the same numbers
come out.
"""

import argparse
import os
import shutil
import signal
import tempfile
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ..nn import HMM
from ..progress import bar

# states of the model that makes the data, and the standard deviations of its transitions and observations
_MEANS, _STAYS = (-2.0, 0.0, 1.0, 4.0), 50


def main() -> None:
    """Fit the model, and print the log-likelihood of every iteration on the first rank."""
    options = _options()
    _join(timedelta(seconds=options.timeout))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    file = options.folder / f"observations-{options.steps}.f32"
    if rank == 0 and not file.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        _make_data(file, options.steps)
    dist.barrier()
    part = slice(options.steps * rank // ranks, options.steps * (rank + 1) // ranks)
    observations = np.memmap(file, np.float32, "r+")[part]
    data = torch.from_numpy(observations)

    hmm = HMM(len(_MEANS), "gaussian", generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.Adam(hmm.parameters(), 0.1)
    done = _restore(options.folder, hmm, optimiser)
    log_likelihood = 0.0
    shown = rank == 0 and find_spec("tqdm") is not None
    for iteration in bar(range(done + 1, options.iterations + 1), "iterations", shown, "iterations"):
        optimiser.zero_grad()
        log_prob = hmm.log_prob(data, group=dist.group.WORLD)
        if iteration == options.kill and rank == ranks - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        (-log_prob / options.steps).backward()
        optimiser.step()
        _save(options.folder, iteration, hmm, optimiser)
        log_likelihood = log_prob.item()
        if rank == 0:
            print(f"iteration {iteration}: log-likelihood {log_likelihood!r} nats", flush=True)
    if rank == 0:
        shutil.rmtree(options.folder / "checkpoints")
    dist.destroy_process_group()


def _join(timeout: timedelta) -> None:
    """Join the group of this attempt.

    torchrun keeps its store when it starts ranks again, and they would read where those of the attempt before listened.
    """
    place = os.environ
    rank, ranks, attempt = (int(place[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place["MASTER_ADDR"], int(place["MASTER_PORT"]), ranks, is_master=False, timeout=timeout
    )
    own = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks, timeout=timeout)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="logchain.distributed.example", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000_000, help="the length of the sequence")
    parser.add_argument("--iterations", type=int, default=5, help="steps of the optimiser")
    parser.add_argument("--kill", type=int, default=0, help="the iteration in which the last rank is killed once")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank waits for the others")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "logchain-example",
        help="where data and parameters are kept, for all ranks",
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("expected to be started by torchrun --nproc-per-node 2 -m logchain.distributed.example")
    return options


def _make_data(file: Path, steps: int) -> None:
    """Write observations of a chain that stays in a state for some 50 steps, drawn from normal distributions."""
    generator = np.random.default_rng(0)
    runs = generator.geometric(1 / _STAYS, 2 * steps // _STAYS + 100)
    states = generator.integers(0, len(_MEANS), len(runs)).repeat(runs)[:steps]
    noise = generator.standard_normal(steps, dtype=np.float32)
    part = file.with_suffix(".part")
    (np.array(_MEANS, np.float32)[states] + noise).tofile(part)
    part.rename(file)


def _save(folder: Path, iteration: int, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Save parameters and the optimiser's state under the number of the iteration."""
    weights, state = get_state_dict(model, optimiser)
    place = folder / "checkpoints" / str(iteration)
    state_of_both = {"model": weights, "optimiser": state}
    checkpoints.save(state_of_both, checkpoint_id=place)  # type: ignore[attr-defined]


def _restore(folder: Path, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """The number of the last iteration that was saved as a whole, whose parameters are loaded; 0 for none."""
    saved = (int(place.parent.name) for place in (folder / "checkpoints").glob("*/.metadata"))
    last = max(saved, default=0)
    if last:
        weights, state = get_state_dict(model, optimiser)
        place = folder / "checkpoints" / str(last)
        checkpoints.load(  # type: ignore[attr-defined]
            {"model": weights, "optimiser": state}, checkpoint_id=place
        )
        set_state_dict(model, optimiser, model_state_dict=weights, optim_state_dict=state)
    return last


if __name__ == "__main__":
    main()
