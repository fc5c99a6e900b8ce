"""The README's tables, drawn from the results files."""

from collections.abc import Callable, Iterable, Sequence
from math import isinf, isnan
from pathlib import Path

from tests.benchmarks import kept, results
from tests.benchmarks.results import FORWARD, GRADIENTS, Measured, digits, read

README = Path(__file__).parents[2] / "README.md"


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


def _ratios(path: Path, mode: str) -> str:
    rows = [row for row in read(path) if row.metric != "time"]
    lines = [
        (r.workload, r.mode, r.metric, r.text, r.bar or "", ("yes" if r.reached else "no") if r.bar else "")
        for r in rows
    ]
    return _markdown(("workload, float32", mode, "what", "measured", "bar", "reached"), lines)


def peers() -> str:
    """Logchain's time, the floors' and the fastest peers' of each workload on a CPU."""
    cases: dict[tuple[str, str], dict[str, Measured]] = {}
    for row in read(results.PEERS, Measured):
        if row.mode in (FORWARD, GRADIENTS) and row.device == "CPU":
            cases.setdefault((row.workload, row.mode), {})[row.provider] = row
    lines = []
    for case, found in cases.items():
        ours, *floors = (
            f"{digits(row.median_ms)} ms" if (row := found.pop(name, None)) else ""
            for name in ("logchain", "GEMMs alone", "bytes copied")
        )
        ratios = sorted((row.ratio, name) for name, row in found.items())
        fastest = "; ".join(f"{name} {ratio:.2g} x" for ratio, name in ratios[:4])
        plain = (f"{digits(found[name].ratio)} x" if name in found else "" for name in ("torch loop", "forum"))
        lines.append((*case, ours, *floors, fastest, str(len(ratios)), *plain))
    header = "workload, float32", "mode", "logchain", "GEMMs alone", "bytes copied"
    fastest = "the fastest peers' time over logchain's"
    return _markdown((*header, fastest, "peers", "torch loop's", "forum's code's"), lines)


def accuracy() -> str:
    """Errors of log-partitions and of posteriors, case by case."""
    metrics = ("error of a log-partition", "error of a posterior")
    found = {(r.provider, r.workload, r.metric): r for r in read(results.ACCURACY)}

    def cell(provider: str, case: str) -> str:
        if (provider, case, metrics[0]) not in found:
            return _reason("accuracy", provider, case)
        value = found[provider, case, "log-partition"]._replace(unit="")
        errors = [found[provider, case, metric]._replace(unit="") for metric in metrics]
        texts = ["NaN" if isnan(row.value) else "< 1e-12" if 0 < row.value < 1e-12 else row.text for row in errors]
        if isinf(errors[0].value):  # one of the two is -inf, and the other is not
            texts[0] = value.text if isinf(value.value) else f"finite: {value.text}"
        return ", ".join(texts)

    return _by_provider(list(found), cell)


def memory() -> str:
    """Peaks over the size of the inputs."""
    ending = "over the inputs"
    rows = [row for row in read(results.MEMORY) if row.metric.endswith(ending)]
    found = {(r.provider, f"{r.workload}: {r.mode}", r.metric): r for r in rows}

    def cell(provider: str, case: str) -> str:
        row = found.get((provider, case, f"peak of resident memory {ending}"))
        return row.text if row else _reason("memory", provider, *case.split(": "))

    return _by_provider(list(found), cell)


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
    "layers": layers,
    "memory": memory,
    "peers": peers,
    "questions": questions,
}


def fill(readme: str) -> str:
    """The README with the text between each pair of markers written anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: from the results file -->\n", f"<!-- {name}: end -->"
        head, rest = readme.split(begin)
        readme = head + begin + table() + "\n" + end + rest.split(end)[1]
    return readme


def update_readme() -> None:
    """Write the README's tables."""
    README.write_text(fill(README.read_text()))


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)]
    return "\n".join(body)
