#!/usr/bin/env python3
"""Sends the scalars of a run to W&B or MLflow, while it trains or afterwards.

    pip install wandb     # or mlflow
    python3 examples/trackers/follow.py work_dirs/resnet --to wandb --project digits

It reads `scalars.json` beside the run, on rank 0's machine, so the run needs neither a network nor
Python, and a tracker that is down does not stop it. Stop it with SIGINT or SIGTERM; `--once` sends the
lines that are there and exits.

WORK_DIR may hold several runs that resumed each other: all their files go to one run of the tracker. A
file beside them records what was sent, so that the program can be restarted; a line that was sent just
before it was killed is sent again. A line without its end is read when it is complete, and a file that
became shorter, or was replaced, is read from its beginning.
"""

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, args, run_id):
        import wandb

        self.run = wandb.init(project=args.project, name=args.name, id=run_id, resume="allow")
        # A resumed run repeats iterations, and W&B's own step never goes back.
        self.run.define_metric("iter")
        self.run.define_metric("*", step_metric="iter")
        self.id = self.run.id

    def log(self, metrics, iteration):
        self.run.log({**metrics, "iter": iteration})

    def finish(self):
        self.run.finish()


class MLflow:
    """A run of MLflow, at the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, args, run_id):
        import mlflow

        self.mlflow = mlflow
        if args.project:
            mlflow.set_experiment(args.project)
        self.id = mlflow.start_run(run_id=run_id, run_name=args.name).info.run_id

    def log(self, metrics, iteration):
        self.mlflow.log_metrics(metrics, step=iteration)

    def finish(self):
        self.mlflow.end_run()


TRACKERS = {"wandb": Wandb, "mlflow": MLflow}


class State:
    """What was sent, in a file that is replaced as a whole."""

    def __init__(self, path):
        self.path = path
        try:
            saved = json.loads(path.read_text())
        except FileNotFoundError:
            saved = {}
        self.run_id = saved.get("run_id")
        # The last iteration of a training line.
        self.iteration = saved.get("iteration", 0)
        # By path: the file's inode and the number of bytes that were read.
        self.files = saved.get("files", {})

    def save(self):
        saved = {"run_id": self.run_id, "iteration": self.iteration, "files": self.files}
        new = self.path.with_name(self.path.name + ".new")
        new.write_text(json.dumps(saved))
        os.replace(new, self.path)


def scalar_files(path):
    """The files of a run, oldest first: their directories are named after the time."""
    if path.is_file():
        return [path]
    return sorted(path.glob("*/vis_data/scalars.json")) or sorted(path.glob("vis_data/scalars.json"))


def new_lines(path, state):
    """Yields the complete lines that were not sent yet, and notes each once it was."""
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        inode, done = state.files.get(str(path), (info.st_ino, 0))
        if inode != info.st_ino or info.st_size < done:
            done = 0
        file.seek(done)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line
            done += len(line)
            state.files[str(path)] = (info.st_ino, done)


def send(line, where, tracker, state):
    """Sends one line. All its values are at an iteration, those of a validation at the last one."""
    try:
        record = json.loads(line)
        step = int(record.pop("step"))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        print(f"warning: {where}: not a line of scalars: {error}: {line[:80]!r}", file=sys.stderr)
        return
    if "iter" in record:
        state.iteration = int(record.pop("iter"))
        iteration = state.iteration
    else:
        iteration = max(state.iteration, step)
    # A number that is not finite is null.
    metrics = {name: value for name, value in record.items() if isinstance(value, (int, float))}
    if metrics:
        tracker.log(metrics, iteration)


def send_new(path, tracker, state):
    """Sends all that is new; returns whether anything was."""
    before = json.dumps(state.files)
    for file in scalar_files(path):
        try:
            for line in new_lines(file, state):
                send(line, file, tracker, state)
        except FileNotFoundError:
            pass  # The run was removed meanwhile.
    sent = before != json.dumps(state.files)
    if sent:
        state.save()
    return sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="a work directory, or one scalars.json")
    parser.add_argument("--to", choices=TRACKERS, required=True)
    parser.add_argument("--project", help="W&B's project, MLflow's experiment")
    parser.add_argument("--name", help="name of the run there")
    parser.add_argument("--once", action="store_true", help="send what is there, and exit")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two reads")
    args = parser.parse_args()
    if not args.path.exists():
        parser.error(f"{args.path} does not exist; name the work_dir of the run")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    args.path = args.path.resolve()
    directory = args.path if args.path.is_dir() else args.path.parent
    state = State(directory / f".follow-{args.to}.json")
    tracker = TRACKERS[args.to](args, state.run_id)
    state.run_id = tracker.id
    state.save()
    try:
        send_new(args.path, tracker, state)
        while not args.once and not stop.wait(args.interval):
            send_new(args.path, tracker, state)
        send_new(args.path, tracker, state)
    finally:
        state.save()
        tracker.finish()


if __name__ == "__main__":
    main()
