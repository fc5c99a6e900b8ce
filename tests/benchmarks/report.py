"""The tables of the README and of the documentation's pages, written from the results files."""

import re
from collections.abc import Callable, Iterable, Sequence
from math import isinf, isnan
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks import kept, results
from tests.benchmarks.results import FORWARD, GRADIENTS, MEETING, STRATEGIES, Measured, Row, Scheduled, digits, read

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# every document that may hold tables
DOCUMENTS = [README, *sorted((ROOT / ".docs" / "pages").glob("*.md"))]
# a number with a unit, which documents show in tables only
MEASURED = re.compile(r"\d (ms|s|seconds|GB|MB|x|times)\b")
# not packages: what the time of a package is compared with
FLOORS = "GEMMs alone", "bytes copied"


class Job(NamedTuple):
    """A line of the summary: one case of a results file, in a user's words."""

    name: str
    size: str
    results: Path
    workload: str
    mode: str


SUMMARY = [
    Job(
        "train a CRF: loss and gradients",
        "32 sentences of up to 128 words, 20 tags",
        results.LAYERS,
        "CRF n=32 v=128 c=20, ragged mask, 2 threads",
        "loss, forward and backward",
    ),
    Job(
        "fit an HMM: 50 iterations of EM",
        "200 sequences of 50 steps, 50 states",
        results.LAYERS,
        "HMM n=200 v=50 c=50, Gaussian, 2 threads",
        "EM, 50 iterations",
    ),
    Job(
        "best paths (Viterbi)",
        "32 sequences of 512 steps, 64 states",
        results.QUESTIONS,
        "n=32 v=512 c=64, one matrix",
        "viterbi",
    ),
    Job(
        "log-likelihood and posteriors, one long sequence",
        "10,000 steps, 16 states",
        results.PEERS,
        "n=1 v=10000 c=16, one matrix",
        GRADIENTS,
    ),
    Job(
        "log-partitions and gradients, a large batch",
        "500 sequences of 40 steps, 200 states",
        results.PEERS,
        "n=500 v=40 c=200, shared bulk",
        GRADIENTS,
    ),
    Job(
        "log-partitions and gradients, a tiny batch",
        "10 sequences of 6 steps, 40 states",
        results.PEERS,
        "n=10 v=6 c=40, shared bulk",
        GRADIENTS,
    ),
]


def summary() -> str:
    """Six jobs: logchain's time, and the fastest of the packages that were measured at the same."""
    lines = []
    for job in SUMMARY:
        milliseconds, ratios = measured(job)
        ratio, fastest = min((ratio, name) for name, ratio in ratios.items())
        lines.append((job.name, job.size, f"{digits(milliseconds)} ms", fastest, f"{ratio:.2g} x", str(len(ratios))))
    header = (
        "job, float32",
        "size",
        "logchain",
        "fastest other package",
        "its time over logchain's",
        "packages measured",
    )
    return _markdown(header, lines)


def measured(job: Job) -> tuple[float, dict[str, float]]:
    """Logchain's time of a job in milliseconds, and the times of others over logchain's, by package."""
    if job.results == results.PEERS:
        cases = [
            row for row in read(job.results, Measured) if (row.workload, row.mode, row.device) == (*job[3:], "CPU")
        ]
        ratios = {row.provider: row.ratio for row in cases if row.provider not in ("logchain", *FLOORS)}
        return next(row.median_ms for row in cases if row.provider == "logchain"), ratios
    rows = [row for row in read(job.results) if (row.workload, row.mode) == job[3:]]
    ratios = {row.provider: row.value for row in rows if row.provider != "logchain"}
    return next(row.value for row in rows if row.metric == "time"), ratios


def figures() -> str:
    """Every number that has a bar."""
    rows = [row for row in read(results.PRODUCT) if row.bar]
    lines = [(r.workload, r.mode, r.metric, r.text, r.bar, "yes" if r.reached else "no") for r in rows]
    return _markdown(("workload, float32", "mode", "what", "measured", "bar", "reached"), lines)


def faults() -> str:
    """What the forum's code gets wrong, in numbers."""
    values = {(r.workload, r.provider): f"{r.value:.2f}" for r in read(results.PRODUCT) if r.metric == "value"}
    providers = ("scipy float64", "logchain", "forum")
    cases = dict.fromkeys(workload for workload, _ in values)
    lines = [(case, *(values[case, provider] for provider in providers)) for case in cases]
    return _markdown(("log-partition in nats", "scipy, float64", "logchain, float32", "forum's code"), lines)


def questions() -> str:
    """What the questions of a chain cost, from their own results file."""
    return _ratios(results.QUESTIONS, "question")


def layers() -> str:
    """What training a layer costs, from its own results file."""
    return _ratios(results.LAYERS, "mode")


def structures() -> str:
    """What chains of structures cost, from their own results file."""
    return _ratios(results.STRUCTURES, "mode")


def _ratios(path: Path, mode: str) -> str:
    rows = [row for row in read(path) if row.metric != "time"]
    lines = [
        (r.workload, r.mode, r.metric, r.text, r.bar or "", ("yes" if r.reached else "no") if r.bar else "")
        for r in rows
    ]
    return _markdown(("workload, float32", mode, "what", "measured", "bar", "reached"), lines)


def ranks() -> str:
    """What two ranks gain, from their own results file."""
    rows = [row for row in read(results.RANKS) if row.unit == "x" or row.mode == "gather"]
    rows = [row for row in rows if row.metric != "predicted speed-up"]
    lines = [
        (r.workload, r.mode, r.metric, r.text, r.bar, ("yes" if r.reached else "no") if r.bar else "") for r in rows
    ]
    return _markdown(("workload, float32", "mode", "what", "measured", "bar", "reached"), lines)


def predicted_ranks() -> str:
    """What the cost model says that so many ranks gain, and by which cut."""
    rows = [row for row in read(results.RANKS) if row.metric == "predicted speed-up"]
    found = {(row.workload, row.mode): f"{row.provider} {digits(row.value)} x" for row in rows}
    cases, counts = (list(dict.fromkeys(keys)) for keys in zip(*found, strict=True))
    return _markdown(("ranks", *cases), [(count, *(found[case, count] for case in cases)) for count in counts])


def overlapped() -> str:
    """Milliseconds of one long sequence by each schedule."""
    cases: dict[tuple[str, str, str], dict[str, Scheduled]] = {}
    for row in read(results.OVERLAPPED, Scheduled):
        cases.setdefault((row.chain, row.threads, row.mode), {})[row.strategy] = row
    lines = []
    for case, rows in cases.items():
        times = (digits(rows[name].median_ms) if name in rows else "" for name in STRATEGIES)
        floor = digits(next(iter(rows.values())).products_ms)
        ratios = (f"{digits(rows[name].ratio)} x" if name in rows else "" for name in ("overlapped", "auto"))
        lines.append((*case, floor, *times, *ratios, rows["auto"].taken))
    header = ("chain, float32", "threads", "mode", "products alone", *STRATEGIES)
    ratio = "time over the best other schedule's"
    return _markdown((*header, f"overlapped: {ratio}", "auto: likewise", "auto takes"), lines)


def idle() -> str:
    """How much faster two threads answer the questions of one sequence than one."""
    return _on_two_threads({(row.workload, row.mode): row.text for row in _ratios_of_two(False)})


def meeting() -> str:
    """How much faster two threads walk one sequence from both ends than one walks it."""
    return _on_two_threads({(row.workload, row.mode.removeprefix(MEETING)): row.text for row in _ratios_of_two(True)})


def _ratios_of_two(halves: bool) -> list[Row]:
    return [row for row in read(results.IDLE) if row.unit == "x" and row.mode.startswith(MEETING) == halves]


def _on_two_threads(ratios: dict[tuple[str, str], str]) -> str:
    cases, questions = (list(dict.fromkeys(keys)) for keys in zip(*ratios, strict=True))
    return _markdown(("chain, float32", *questions), [(case, *(ratios[case, q] for q in questions)) for case in cases])


def sharpness() -> str:
    """Times of sharp emissions over those of x ~ N(0, 1)."""
    rows = read(results.SHARPNESS)
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row.workload, row.mode), []).append(row)
    lines = [
        (*case, *(row.text for row in found), "yes" if all(row.reached for row in found) else "no")
        for case, found in cases.items()
    ]
    heads = (f"x ~ {sharp} N(0, 1)" for sharp in dict.fromkeys(row.metric for row in rows))
    peer = next(row for row in read(results.PEERS, Measured) if "N(0, 1)" in row.workload)
    place = f"Measured on {rows[0].date}: {rows[0].hardware}; those beside peers on {peer.date}: {peer.hardware}."
    return f"{place}\n\n{_markdown(('workload', 'mode', *heads, f'all {rows[0].bar} x'), lines)}"


def peers() -> str:
    """Logchain's time, the floors' and the fastest peers' of each workload on a CPU."""
    cases: dict[tuple[str, str], dict[str, Measured]] = {}
    for row in read(results.PEERS, Measured):
        if row.mode in (FORWARD, GRADIENTS) and row.device == "CPU":
            cases.setdefault((row.workload, row.mode), {})[row.provider] = row
    lines = []
    for case, providers in cases.items():
        ours, *floors = (
            f"{digits(row.median_ms)} ms" if (row := providers.pop(name, None)) else ""
            for name in ("logchain", *FLOORS)
        )
        ratios = sorted((row.ratio, name) for name, row in providers.items())
        fastest = "; ".join(f"{name} {ratio:.2g} x" for ratio, name in ratios[:4])
        plain = (f"{digits(providers[name].ratio)} x" if name in providers else "" for name in ("torch loop", "forum"))
        lines.append((*case, ours, *floors, fastest, str(len(ratios)), *plain))
    header = "workload, float32", "mode", "logchain", "GEMMs alone", "bytes copied"
    fastest = "the fastest peers' time over logchain's"
    return _markdown((*header, fastest, "peers", "torch loop's", "forum's code's"), lines)


def accuracy() -> str:
    """Errors of log-partitions and of posteriors, case by case."""
    metrics = ("error of a log-partition", "error of a posterior")
    measured = {(r.provider, r.workload, r.metric): r for r in read(results.ACCURACY)}

    def cell(provider: str, case: str) -> str:
        if (provider, case, metrics[0]) not in measured:
            return _reason("accuracy", provider, case)
        value = measured[provider, case, "log-partition"]._replace(unit="")
        errors = [measured[provider, case, metric]._replace(unit="") for metric in metrics]
        texts = ["NaN" if isnan(row.value) else "< 1e-12" if 0 < row.value < 1e-12 else row.text for row in errors]
        if isinf(errors[0].value):  # one of the two is -inf, and the other is not
            texts[0] = value.text if isinf(value.value) else f"finite: {value.text}"
        return ", ".join(texts)

    return _by_provider(list(measured), cell)


def memory() -> str:
    """Peaks over the size of the inputs."""
    ending = "over the inputs"
    rows = [row for row in read(results.MEMORY) if row.metric.endswith(ending)]
    measured = {(r.provider, f"{r.workload}: {r.mode}", r.metric): r for r in rows}

    def cell(provider: str, case: str) -> str:
        row = measured.get((provider, case, f"peak of resident memory {ending}"))
        return row.text if row else _reason("memory", provider, *case.split(": "))

    return _by_provider(list(measured), cell)


def _by_provider(keys: Sequence[tuple[str, str, str]], cell: Callable[[str, str], str]) -> str:
    """A line for each provider and a column for each case; logchain first."""
    cases = list(dict.fromkeys(case for _, case, _ in keys))
    providers = dict.fromkeys(["logchain", *(provider for provider, *_ in keys)])
    lines = [(provider, *(cell(provider, case) for case in cases)) for provider in providers]
    return _markdown(("provider", *cases), lines)


def _reason(group: str, provider: str, workload: str, mode: str = GRADIENTS) -> str:
    """Why there is no number; nothing for what a provider does not take."""
    reasons = {entry[:4]: entry.reason for entry in kept.left_out()}
    return reasons.get((group, workload, provider, mode), "").split(":")[0]


def caption() -> str:
    """Where the numbers come from."""
    row = read(results.PRODUCT)[0]
    return f"Measured on {row.date}: {row.hardware}, one thread where nothing else is said; {row.versions}."


TABLES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "caption": caption,
    "faults": faults,
    "figures": figures,
    "idle": idle,
    "layers": layers,
    "meeting": meeting,
    "memory": memory,
    "overlapped": overlapped,
    "peers": peers,
    "predicted_ranks": predicted_ranks,
    "questions": questions,
    "ranks": ranks,
    "sharpness": sharpness,
    "structures": structures,
    "summary": summary,
}


def fill(text: str) -> str:
    """A document with the text between each pair of markers written anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: from the results file -->\n", f"<!-- {name}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            text = head + begin + table() + "\n" + end + rest.split(end)[1]
    return text


def prose(text: str) -> str:
    """A document without its tables of results and its code."""
    without_tables = re.sub(r"<!-- (\w+): from the results file -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```", "", without_tables, flags=re.DOTALL)


def update() -> None:
    """Write the tables of all documents."""
    for path in DOCUMENTS:
        path.write_text(fill(path.read_text()))


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)]
    return "\n".join(body)
