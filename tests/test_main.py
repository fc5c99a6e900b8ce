"""The command line: what it prints, saves and refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import logchain
from logchain import demo, reference
from logchain.__main__ import main


@pytest.fixture
def save(tmp_path):
    def write(**content):
        np.savez(tmp_path / "chain.npz", **content)
        return str(tmp_path / "chain.npz")

    return write


def arrays(dtype=np.float32, **changes):
    generator = np.random.default_rng(0)
    x, bulk = generator.normal(size=(2, 4, 3)).astype(dtype), generator.random((1, 3, 3, 3)).astype(dtype)
    return {"x": x, "bulk": bulk, "p0": np.full((1, 3), 0.5, dtype)} | changes


INTEGERS = np.arange(24).reshape(2, 4, 3)


@pytest.mark.parametrize("chain", [arrays(), arrays(np.float64, x=INTEGERS), arrays(">f4")])
def test_log_partitions_of_a_file_are_printed(save, capsys, chain):
    assert main([save(**chain)]) == 0
    printed = [float(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(printed, reference.product(**chain), rtol=0, atol=1e-5)


def test_log_partitions_of_a_file_are_saved_under_the_given_name(save, tmp_path, capsys):
    chain = arrays()
    logs = {"bulk": np.log(chain["bulk"]), "p0": np.log(chain["p0"]), "lengths": np.array([2, 4], np.int32)}
    assert main([save(**chain | logs), "--log-params", "--output", str(tmp_path / "result")]) == 0
    assert capsys.readouterr().out == ""
    saved = np.load(tmp_path / "result")
    assert saved.dtype == np.float32
    np.testing.assert_allclose(saved, reference.product(**chain, lengths=[2, 4]), rtol=0, atol=1e-5)


def assert_refused(capsys, argv, words):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert captured.err.startswith("logchain: ") and words in captured.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"x": np.ones(3)}, "bulk, p0: missing"),
        (arrays(length=np.array([2, 4])), "length: expected only x, bulk, p0 and lengths"),
        (arrays(p0=np.ones((1, 5), np.float32)), "p0"),
        (arrays(bulk=np.array(["a", "b"])), "bulk: expected real numbers"),
        (arrays(x=np.ones((2, 4, 3), np.longdouble)), "x: expected real numbers"),
        (arrays(x=np.array([{}, None], object)), "pickle"),
        (arrays(bulk=-np.ones((1, 3, 3, 3), np.float32)), "bulk"),
        (arrays(lengths=np.array([1.5, 2.0])), "lengths: expected integers"),
        (arrays(lengths=np.array([2, 9])), "lengths"),
    ],
)
def test_wrong_arrays_are_refused_in_one_line(save, capsys, content, words):
    assert_refused(capsys, [save(**content)], words)


def test_files_that_cannot_be_read_or_written_are_refused(save, tmp_path, capsys):
    path = save(**arrays())
    assert_refused(capsys, [path, "--output", str(tmp_path / "none" / "out.npy")], "cannot be written")
    data = Path(path).read_bytes()
    for wrong in b"", b"x, bulk, p0\n", data[:200], data[:100] + bytes(40) + data[140:]:
        Path(path).write_bytes(wrong)
        assert_refused(capsys, [path], "chain.npz")
    assert_refused(capsys, [str(tmp_path / "none.npz")], "no such file")
    assert_refused(capsys, [str(tmp_path)], "not readable")


@pytest.mark.parametrize(
    "options", ["--size 3,4", "--size 1,1,2", "--size a,b,c", "--output o.npy", "f.npz --size 1,2,3"]
)
def test_wrong_options_exit_with_2(options, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(options.split())
    assert leaving.value.code == 2 and "error:" in capsys.readouterr().err


def test_help_and_version(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for option, words in (("--help", "FILE.npz"), ("--version", f"logchain {logchain.__version__}")):
        with pytest.raises(SystemExit) as leaving:
            main([option])
        text = capsys.readouterr().out
        assert leaving.value.code == 0 and words in text and max(map(len, text.splitlines())) <= 88


def test_the_demonstration_keeps_what_it_promises(capsys):
    assert main(["--size", "6,9,5"]) == 0
    text = capsys.readouterr().out
    names = "log-partition, nats", "gradient by x", "bulk * gradient", "p0 * gradient"
    for name in names:
        error, promised = re.search(rf"^{re.escape(name)} .*?(\S+)  +(\S+e[+-]\d+)$", text, re.MULTILINE).groups()
        assert float(error) <= float(promised)
    for row in "logchain", "8, 24 matrix products", "torch.logsumexp, about":
        assert re.search(rf"^{re.escape(row)} .* ms .* MB$", text, re.MULTILINE), row
    assert max(map(len, text.splitlines())) <= 80


def test_the_scan_of_the_demonstration_computes_the_product():
    chain = demo.dense_chain(3, 6, 4)
    scan = demo.logsumexp_scan(*chain).double().numpy()
    np.testing.assert_allclose(scan, reference.product(*chain), rtol=1e-5)


def test_the_module_exits_with_the_code_of_main(tmp_path):
    # the library that is tested here, which need not lie in the folder of the tests
    environment = {**os.environ, "PYTHONPATH": str(Path(logchain.__file__).parents[1])}
    command = [sys.executable, "-m", "logchain", str(tmp_path / "none.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [f"logchain: {tmp_path / 'none.npz'}: no such file"]
