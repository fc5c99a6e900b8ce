"""The command line: what it prints, saves and refuses."""

import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import logchain
from logchain import demo, demo_plot, reference
from logchain.__main__ import main


def arrays(dtype=np.float32, v=4, c=3):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, v, c)).astype(dtype)
    return {"x": x, "bulk": generator.random((1, v - 1, c, c)).astype(dtype), "p0": np.full((1, c), 0.5, dtype)}


@pytest.fixture
def save(tmp_path):
    def write(**content):
        path = tmp_path / "chain.npz"
        np.savez(path, **content)
        return str(path)

    return write


def printed(capsys):
    return [float(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ">f4"])
def test_file_prints_one_number_a_line(save, capsys, dtype):
    chain = arrays(dtype)
    assert main([save(**chain)]) == 0
    np.testing.assert_allclose(printed(capsys), reference.product(**chain), rtol=0, atol=1e-5)


def test_integers_are_read_as_float64(save, capsys):
    chain = {"x": np.zeros((1, 3, 2), np.int64), "bulk": np.ones((1, 2, 2, 2), int), "p0": np.ones((1, 2), np.uint8)}
    assert main([save(**chain)]) == 0
    np.testing.assert_allclose(printed(capsys), [3 * np.log(2)], rtol=1e-15)


def test_lengths_and_log_params(save, capsys):
    chain = arrays()
    logs = chain | {"bulk": np.log(chain["bulk"]), "p0": np.log(chain["p0"]), "lengths": np.array([2, 4], np.int32)}
    assert main([save(**logs), "--log-params"]) == 0
    expected = reference.product(**chain, lengths=[2, 4])
    np.testing.assert_allclose(printed(capsys), expected, rtol=0, atol=1e-5)


def test_output_is_saved_under_exactly_that_name(save, tmp_path, capsys):
    chain = arrays()
    out = tmp_path / "result"
    assert main([save(**chain), "--output", str(out)]) == 0
    assert capsys.readouterr().out == ""
    saved = np.load(out)
    assert saved.dtype == np.float32
    np.testing.assert_allclose(saved, reference.product(**chain), rtol=0, atol=1e-5)


def without(name):
    return {key: array for key, array in arrays().items() if key != name}


WRONG_ARRAYS = {
    "missing x": (without("x"), "x: missing"),
    "missing bulk": (without("bulk"), "bulk: missing"),
    "no arrays": ({}, "x, bulk, p0: missing"),
    "states differ": (arrays() | {"p0": np.ones((1, 5), np.float32)}, "p0"),
    "steps differ": (arrays() | {"bulk": np.ones((1, 7, 3, 3), np.float32)}, "bulk"),
    "too few axes": (arrays() | {"x": np.ones(3, np.float32)}, "x"),
    "scalar": (arrays() | {"x": np.float32(1)}, "x"),
    "text": (arrays() | {"bulk": np.array(["a", "b"])}, "bulk: expected real numbers"),
    "complex": (arrays() | {"x": np.ones((2, 4, 3), np.complex64)}, "x: expected real numbers"),
    "boolean": (arrays() | {"p0": np.ones((1, 3), bool)}, "p0: expected real numbers"),
    "long double": (arrays() | {"x": np.ones((2, 4, 3), np.longdouble)}, "x: expected real numbers"),
    "pickled": (arrays() | {"x": np.array([{}, None], object)}, "pickle"),
    "negative": (arrays() | {"bulk": -np.ones((1, 3, 3, 3), np.float32)}, "bulk"),
    "fractional lengths": (arrays() | {"lengths": np.array([1.5, 2.0])}, "lengths: expected integers"),
    "long lengths": (arrays() | {"lengths": np.array([2, 9])}, "lengths"),
}


def assert_refused(capsys, argv, words):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("logchain: ")
    assert words in captured.err


@pytest.mark.parametrize("content, words", WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
def test_wrong_arrays_are_refused_in_one_line(save, capsys, content, words):
    assert_refused(capsys, [save(**content)], words)


def archive(content, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, data in content.items():
            file.writestr(name, data)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def damaged():
    """A compressed archive whose first array is overwritten in the middle."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays(v=50))
    data = bytearray(buffer.getvalue())
    data[100:140] = bytes(40)
    return bytes(data)


WRONG_BYTES = {
    "empty": b"",
    "text": b"x, bulk, p0\n1, 2, 3\n",
    "pickle": b"\x80\x04N.",
    "single array": npy(np.ones(3)),
    "cut off": archive({"x.npy": npy(np.ones(300))})[:200],
    "damaged": damaged(),
    "not arrays": archive({"x": b"1", "bulk": b"2", "p0": b"3"}),
    "header only": archive({f"{name}.npy": npy(np.ones(9))[:128] for name in ("x", "bulk", "p0")}),
    "huge shape": archive(
        {
            f"{name}.npy": npy(np.ones(9)).replace(b"(9,), }" + b" " * 12, b"(999999999999999,)}")
            for name in "x bulk p0".split()
        }
    ),
}


@pytest.mark.parametrize("data", WRONG_BYTES.values(), ids=WRONG_BYTES)
def test_wrong_files_are_refused_in_one_line(tmp_path, capsys, data):
    path = tmp_path / "wrong.npz"
    path.write_bytes(data)
    assert_refused(capsys, [str(path)], "wrong.npz")


def test_missing_files_and_folders_are_refused(save, tmp_path, capsys):
    assert_refused(capsys, [str(tmp_path / "none.npz")], "no such file")
    assert_refused(capsys, [str(tmp_path)], "not readable")
    assert_refused(capsys, [save(**arrays()), "--output", str(tmp_path / "none" / "out.npy")], "cannot be written")


@pytest.mark.parametrize(
    "argv",
    [["--size", "3,4"], ["--size", "1,1,2"], ["--size", "a,b,c"], ["--output", "out.npy"], ["--log-params"],
     ["f.npz", "--size", "2,3,4"], ["f.npz", "--plot", "p.png"], ["--nonsense"]],
)  # fmt: skip
def test_wrong_options_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(argv)
    assert leaving.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_demonstration_keeps_what_it_promises(capsys):
    assert main(["--size", "6,9,5"]) == 0
    text = capsys.readouterr().out
    rows = re.findall(
        r"^  (log-partition, nats|\S.* gradient|gradient by x) .*?(\S+)  +(\S+e[+-]\d+)$", text, re.MULTILINE
    )
    assert [name for name, _, _ in rows] == ["log-partition, nats", "gradient by x", "bulk * gradient", "p0 * gradient"]
    for _, error, promised in rows:
        assert float(error) <= float(promised)
    for row in (
        "logchain",
        "8 matrix products alone",
        "24 matrix products alone",
        "torch.logsumexp, about",
        "scipy in",
    ):
        assert re.search(rf"^    {re.escape(row)} ", text, re.MULTILINE), row
    assert max(map(len, text.splitlines())) <= 80


def test_text_of_the_largest_numbers_fits_the_width():
    costs = [
        demo.Cost(f"{name}, about", 1e6, 10**13) for name in ("logchain", "9999999 matrix products alone", "torch")
    ]
    checks = [demo.Check("log-partition, nats", -123456789.0, -123456789.0, 1e-100, 1e-100)]
    assert max(map(len, str(demo.Demonstration(10**6, 10**5, 10**4, checks, costs, costs, 10**13)).splitlines())) <= 100


def test_the_scan_that_logchain_is_timed_beside_computes_the_same():
    chain = demo.dense_chain(3, 6, 4)
    torch.testing.assert_close(
        demo.logsumexp_scan(*chain).double().numpy(), reference.product(*chain), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("installed", [False, True])
def test_progress_is_shown_on_a_terminal_only(installed, monkeypatch, capsys):
    if installed:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setattr(demo, "find_spec", lambda name: None)
    demo.demonstrate(2, 3, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["--size", "2,3,2"]) == 0
    shown = capsys.readouterr()
    assert ("4/4" if installed else "computing by torch.logsumexp (3 of 4)") in shown.err
    assert "computing" not in shown.out


def test_help_and_version(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for option, words in (("--help", "--plot FILE.png"), ("--version", f"logchain {logchain.__version__}")):
        with pytest.raises(SystemExit) as leaving:
            main([option])
        text = capsys.readouterr().out
        assert leaving.value.code == 0 and words in text
        assert max(map(len, text.splitlines())) <= 88


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_demonstration_is_drawn(suffix, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"demonstration{suffix}"
    assert main(["--size", "6,9,5", "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    assert f"Drawn: {picture}" in capsys.readouterr().out


@pytest.fixture
def uncomputed(monkeypatch):
    monkeypatch.setattr("logchain.__main__.demonstrate", None)


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path, capsys, uncomputed):
    pytest.importorskip("matplotlib")
    assert_refused(capsys, ["--plot", str(tmp_path / "plot.txt")], "--plot: expected a name that ends in .png")
    assert_refused(capsys, ["--plot", str(tmp_path / "none" / "plot.png")], "cannot be written")
    (tmp_path / "kept.png").write_bytes(b"kept")
    demo_plot.check_plot(str(tmp_path / "kept.png"))
    demo_plot.check_plot(str(tmp_path / "new.png"))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"kept"]


def test_without_matplotlib_a_picture_is_refused_by_name(tmp_path, capsys, monkeypatch, uncomputed):
    monkeypatch.setattr(demo_plot, "find_spec", lambda name: None)
    assert_refused(capsys, ["--plot", str(tmp_path / "plot.png")], "see `pip install matplotlib`")


def test_module_runs_and_hands_on_its_exit_code(tmp_path):
    command = [sys.executable, "-m", "logchain", str(tmp_path / "none.npz")]
    # the library that is tested here, which need not lie in the folder of the tests
    environment = {**os.environ, "PYTHONPATH": str(Path(logchain.__file__).parents[1])}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.splitlines() == [f"logchain: {tmp_path / 'none.npz'}: no such file"]
