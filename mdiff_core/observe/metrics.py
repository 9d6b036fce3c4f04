"""What a run says as it goes: a JSON object a line in `<run folder>/metrics.jsonl`; TensorBoard, W&B where configured.

A record is one flat object. Every number that a stage returns is in it as `<stage>/<name>`, and the stage's wall-clock
time as `seconds/<stage>`:

| key | of a | meaning |
|---|---|---|
| `kind` | both | `round` or `evaluation` |
| `round` | both | counted from 1; of an evaluation: rounds trained before it, so 0 is the start policy |
| `policy`, `parent` | both | version of the policy that came out (or was measured) and of its parent, empty: none |
| `checksum` | both | of that policy's weights |
| `score/reward_mean` | round | mean total over the samples that have one |
| `score/kept_groups`, `score/groups` | round | groups with a kept sample; groups drawn |
| `score/short_groups` | round | with `prompts.oversample`: kept groups that lack |
| `rollout/groups`, `rollout/waves` | round | groups drawn, and in how many waves; see `prompts.oversample` |
| `rollout/weights`, `rollout/weights_checksum` | round | which of the policy's weights drew (live, ema, old), and their checksum |
| `update/loss`, `update/grad_norm` | round | means over the round's optimizer steps |
| `update/drift_max` | round | largest log-prob gap between engine and trainer |
| `evaluate/weights`, `evaluate/weights_checksum` | evaluation | likewise, of what was measured |
| `evaluate/reward_mean` | evaluation | mean total on the held-out prompts |
| `evaluate/gold/<name>/mean` | evaluation | mean of a reward that is not trained on |
| `evaluate/diversity` | evaluation | how different the samples of a prompt are; see `diversity.within` |
| `evaluate/sets/<name>/...` | evaluation | the same numbers of another prompt set |
| `alarm`, `evaluate/alarm` | evaluation | why the reward looks gamed, empty if it does not; the same as 1 or 0 |
| `seconds/rollout` ... | both | per stage |
| `reused` | round | stages whose results were there from an earlier start, or from another run; their seconds are those of then |

`round_record` and `evaluation_record` make these from what the stages return, so nobody writes the keys by hand. A run
that was killed and continued may append a round twice: `read` keeps the last. Numbers that are not finite are `null` in
the file and NaN when read. `<run folder>/run.json` holds what does not change during a run; see `write_run`.
"""

import fcntl
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from mdiff_core.errors import BadArtifact

FILE = "metrics.jsonl"
RUN_FILE = "run.json"
STAGES = ("rollout", "score", "pair", "encode", "update", "evaluate")
"""In the order of a round; the order of charts and legends."""
REWARD = "score/reward_mean"
KEPT_GROUPS = "score/kept_groups"
GROUPS = "score/groups"
LOSS = "update/loss"
GRAD_NORM = "update/grad_norm"
DRIFT = "update/drift_max"
EVALUATED = "evaluate/reward_mean"
DIVERSITY = "evaluate/diversity"
SAMPLES = "evaluate/samples"
GOLD = "evaluate/gold/"
ALARM = "alarm"

Record = dict[str, Any]


def round_record(
    *,
    round: int,
    policy: str,
    parent: str,
    checksum: str,
    stages: Mapping[str, Mapping[str, Any]],
    seconds: Mapping[str, float],
    reused: Sequence[str] = (),
) -> Record:
    """Record of finished round `round` (from 1): `stages` is stage to the metrics it returned, `seconds` stage to time."""
    return _record("round", round, policy, parent, checksum, stages, seconds) | {"reused": list(reused)}


def evaluation_record(
    *, round: int, policy: str, parent: str, checksum: str, metrics: Mapping[str, Any], seconds: float
) -> Record:
    """Record of an evaluation after `round` rounds of training."""
    return _record("evaluation", round, policy, parent, checksum, {"evaluate": metrics}, {"evaluate": seconds})


def _record(
    kind: str,
    round: int,
    policy: str,
    parent: str,
    checksum: str,
    stages: Mapping[str, Mapping[str, Any]],
    seconds: Mapping[str, float],
) -> Record:
    head: Record = {"kind": kind, "round": round, "policy": policy, "parent": parent, "checksum": checksum}
    for stage, metrics in stages.items():
        head |= _flat(stage, metrics)
    return head | {f"seconds/{stage}": float(value) for stage, value in seconds.items()}


def _flat(prefix: str, metrics: Mapping[str, Any]) -> Record:
    """`prefix/name`, and `prefix/outer/inner` for what is nested."""
    flat: Record = {}
    for name, value in metrics.items():
        key = f"{prefix}/{name}"
        flat |= _flat(key, value) if isinstance(value, Mapping) else {key: value}
    return flat


def one_line(record: Record) -> str:
    """What a person watching the run wants to read of a record: one line, fixed order."""
    if record["kind"] == "evaluation":
        alarm = f"  ALARM: {record[ALARM]}" if record.get(ALARM) else ""
        reward = f"reward {_short(record, EVALUATED)}  policy {record['policy']}"
        return f"evaluation after round {record['round']}: {reward}{alarm}"
    timed = [(stage, f"seconds/{stage}") for stage in STAGES if f"seconds/{stage}" in record]
    reused = record.get("reused", ())
    times = " ".join(
        f"{stage} reused" if stage in reused else f"{stage} {_short(record, key, '.1f')}s" for stage, key in timed
    )
    reward = ""
    if REWARD in record:
        kept = f"kept {_short(record, KEPT_GROUPS, '.0f')}/{_short(record, GROUPS, '.0f')} groups"
        reward = f"reward {_short(record, REWARD)}  {kept}  drift {_short(record, DRIFT, '.1e')}  "
    trained = f"loss {_short(record, LOSS, '.3e')}  grad {_short(record, GRAD_NORM, '.3g')}"
    return f"round {record['round']}: {reward}{trained}  {times}"


def _short(record: Record, key: str, form: str = ".4f") -> str:
    value = record.get(key)
    return "-" if value is None else format(value, form)


class Sink(Protocol):
    """Somewhere records go."""

    def write(self, record: Record) -> None:
        """Take one record; it is there to be read when the call returns."""
        ...

    def close(self) -> None:
        """Free what is open."""
        ...


class Metrics:
    """The sinks of a run: `metrics.jsonl` always, the others when the environment names them. The run is called what
    `run.json` says, or like its folder.

    TensorBoard: `MDIFF_TENSORBOARD` is the log folder. W&B: `WANDB_PROJECT` is set and `WANDB_MODE` is not `disabled`
    (needs the `wandb` extra). Both are told every number under its record key, at step = round.
    """

    def __init__(self, folder: Path, *, environment: Mapping[str, str] = os.environ) -> None:
        self._sinks: list[Sink] = [JsonLines(folder / FILE)]
        name = str(read_run(folder)["name"]) if (folder / RUN_FILE).exists() else folder.name
        if environment.get("MDIFF_TENSORBOARD"):
            self._sinks.append(TensorBoard(Path(environment["MDIFF_TENSORBOARD"]) / name))
        if environment.get("WANDB_PROJECT") and environment.get("WANDB_MODE") != "disabled":
            self._sinks.append(WeightsAndBiases(environment["WANDB_PROJECT"], name))

    def write(self, record: Record) -> None:
        """Hand the record to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonLines:
    """Appends; each record is flushed, and a line cut short by a kill is dropped before the next one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115  (closed by close)
        with suppress(OSError):  # another run of the same name may be writing; where there are no locks, hope
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def write(self, record: Record) -> None:
        """One line."""
        self._file.write(json.dumps(_plain(record), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _plain(value: Any) -> Any:
    """JSON types only; numpy and torch scalars become floats, what is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by key."""
    plain: Record = _plain(record)
    return {key: float(value) for key, value in plain.items() if key != "round" and isinstance(value, int | float)}


class TensorBoard:
    """Event files in `folder`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, rarely wanted

        self._writer = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """Every number, at step = round."""
        for key, value in _scalars(record).items():
            self._writer.add_scalar(key, value, record["round"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run of the run's name, continued when the run is."""

    def __init__(self, project: str, name: str) -> None:
        import wandb  # an extra

        self._run = wandb.init(project=project, name=name, id=name, resume="allow")

    def write(self, record: Record) -> None:
        """Every number and the round; W&B's own step counts calls, as it refuses to go back."""
        self._run.log(_scalars(record) | {"round": record["round"]})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def read(folder: Path) -> list[Record]:
    """Records of a run folder, the last of each (kind, round), in the order of rounds, evaluations after their round.

    BadArtifact when there is no metrics file or a line other than a torn last one is not JSON.
    """
    path = folder / FILE
    if not path.exists():
        raise BadArtifact(f"{path}: missing, so {folder} is not the folder of a run; give the one that holds {FILE}")
    found: dict[tuple[int, str], Record] = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # the last piece is empty, or torn by a kill
        try:
            record: Record = {key: math.nan if value is None else value for key, value in json.loads(line).items()}
        except ValueError as error:
            raise BadArtifact(f"{path}:{number}: not a JSON record ({error}); delete the line") from error
        found[(record["round"], record["kind"])] = record
    return [found[key] for key in sorted(found, key=lambda key: (key[0], ("round", "evaluation").index(key[1])))]


RUN_FIELDS = {"name": str, "config": dict, "command": str, "files": dict}
"""Of `run.json`, with their kinds."""


def write_run(folder: Path, *, name: str, config: Mapping[str, Any], command: str, files: Mapping[str, str]) -> None:
    """Write `run.json`: the RunConfig as a JSON object, the command that repeats the run, label -> address of its files, and when
    it was begun (seconds since 1970)."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"name": name, "config": config, "command": command, "files": files, "begun": time.time()}
    text = json.dumps(told, indent=1)
    temporary = folder / f"{RUN_FILE}.{os.getpid()}.tmp"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / RUN_FILE)


def read_run(folder: Path) -> Record:
    """What `write_run` wrote; BadArtifact when there is none."""
    try:
        found: Record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        if not all(isinstance(found[name], kind) for name, kind in RUN_FIELDS.items()):
            raise TypeError("its fields are of other kinds")
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise BadArtifact(
            f"{folder / RUN_FILE}: not a run's description ({error!r}); delete the file and run the workflow again, which writes it"
        ) from error
    return found
