"""The command line: what it prints, saves and refuses."""

import io
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from logchain import reference
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
     ["f.npz", "--size", "2,3,4"], ["--nonsense"]],
)  # fmt: skip
def test_wrong_options_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(argv)
    assert leaving.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_demonstration_keeps_what_it_promises(capsys):
    assert main(["--size", "6,9,5"]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"^  (log-partition|d/d\S+).*?(\S+)  +(\S+)$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["log-partition", "d/dx:", "d/dlog", "d/dlog"]
    for _, error, promised in rows:
        assert float(error) <= float(promised)
    for row in ("forward", "8 GEMMs", "forward and backward", "24 GEMMs", "one message tensor"):
        assert re.search(rf"^  {re.escape(row)} ", text, re.MULTILINE), row
    assert max(map(len, text.splitlines())) <= 88


def test_module_runs_and_hands_on_its_exit_code(tmp_path):
    command = [sys.executable, "-m", "logchain", str(tmp_path / "none.npz")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.splitlines() == [f"logchain: {tmp_path / 'none.npz'}: no such file"]
