"""Tests of the differences between versions of torch. The tables are compared with facts that were collected from each
version. Other tests check the verdicts for files that only some versions load.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.checkpoint.safe_globals import ADDED_BY, ALLOWED, IMPORTED_WITH_TORCH
from ckptconv.checkpoint.torch_versions import KNOWN, Rules, by_version, flaws_of, installed_torch
from ckptconv.checkpoint.weights_only import tensors
from ckptconv.errors import UsageError
from tests.support import torch_facts
from tests.support.archives import rezip
from tests.support.command import Command
from tests.support.hostile_bytes import torch_zip_of
from tests.support.judge import refusal

TABLE = torch_facts.table()
NEWEST = "2.15"


def of(kind: str, version: tuple[int, int]) -> set[str]:
    """Return the facts of the kind `kind` that were collected from the torch `version`."""
    return {fact.removeprefix(f"{kind} ") for fact in TABLE[version] if fact.startswith(f"{kind} ")}


def test_table_has_every_known_version() -> None:
    """The table contains facts of exactly the versions whose rules are known."""
    assert tuple(sorted(TABLE)) == KNOWN


def test_facts_of_the_torch_that_is_installed() -> None:
    """The facts of the installed torch equal those in the table. They could change in a patch release, for example."""
    version = torch_facts.version()
    named = {fact for fact in TABLE[version] if not fact.startswith(("added-by", "code"))}
    assert torch_facts.facts(imports=False) == named


@pytest.mark.parametrize("version", KNOWN)
def test_tables(version: tuple[int, int]) -> None:
    """For each version, the allowlist, the globals that imports add, and the attributes, layouts and device types agree
    with the collected facts.
    """
    rules = Rules(version)
    assert {name for name in ALLOWED if rules.allow(name)} == of("allowed", version)
    added = of("added-by torch", version)
    assert {name for name in IMPORTED_WITH_TORCH if rules.add(name)} <= added and all(map(rules.add, added))
    assert not any(map(rules.add, ("builtins.eval", "builtins.getattr", "torch.load", "traceback.print_exc")))
    for module, names in ADDED_BY.items():
        assert of(f"added-by {module}", version) <= names | ADDED_BY["torch.distributed.tensor"]
    assert of("attribute", version) <= tensors.ATTRIBUTES
    assert of("layout", version) == tensors.LAYOUTS
    assert of("device", version) <= tensors.DEVICE_TYPES
    assert not of("pybind11", version)  # torch 2.15 delays NEWOBJ of such a class until BUILD


def nested() -> Any:
    return torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)])


def coo(indices: Any, *, is_coalesced: bool | None = None) -> Any:
    made = torch.sparse_coo_tensor(torch.tensor(indices), torch.ones(2), (3, 3), check_invariants=False)
    return made._coalesced_(is_coalesced) if is_coalesced is not None else made


def csr(starts: Any, indices: Any, layout: Any = torch.sparse_csr, values: Any = None) -> Any:
    values = torch.ones(2) if values is None else values
    parts = torch.tensor(starts), torch.tensor(indices)
    return torch.sparse_compressed_tensor(*parts, values, (2, 4), layout=layout, check_invariants=False)


INVALID = "refused by torch 2.6 to 2.7, loads in torch 2.8 to 2.13, refused by torch 2.14 to 2.15"
ALWAYS = "loads in torch 2.6 to 2.15"
BLOCKS = torch.ones(2, 1, 2)
#: Objects to save, each with the verdicts of all versions for the file.
FILES: dict[str, tuple[Callable[[], Any], str]] = {
    "plain": (lambda: {"w": torch.ones(2)}, ALWAYS),
    "float8_e8m0fnu": (lambda: torch.ones(2).to(torch.float8_e8m0fnu), "requires torch 2.7 or newer"),
    "nested": (nested, "loads in torch 2.6 to 2.14, refused by torch 2.15"),
    "COO": (lambda: coo([[0, 1], [2, 0]]), ALWAYS),
    "COO that is coalesced": (lambda: coo([[0, 1], [2, 0]], is_coalesced=True), ALWAYS),
    "COO out of order": (lambda: coo([[1, 0], [2, 0]], is_coalesced=True), INVALID),
    "COO beyond its size": (lambda: coo([[0, 99], [2, 0]]), INVALID),
    "COO before its size": (lambda: coo([[0, -1], [2, 0]]), INVALID),
    "CSR": (lambda: csr([0, 1, 2], [3, 0]), ALWAYS),
    "CSR of int32": (lambda: torch.eye(4).to_sparse_csr().to_sparse_csr(), ALWAYS),
    "CSR beyond its size": (lambda: csr([0, 1, 2], [4, 0]), INVALID),
    "CSR out of order": (lambda: csr([0, 2, 2], [3, 0]), INVALID),
    "CSR twice in a place": (lambda: csr([0, 2, 2], [3, 3]), INVALID),
    "CSR that starts late": (lambda: csr([1, 1, 2], [3, 0]), INVALID),
    "CSR that ends early": (lambda: csr([0, 1, 1], [3, 0]), INVALID),
    "CSR that runs back": (lambda: csr([0, 3, 2], [3, 0]), INVALID),
    "CSC": (lambda: csr([0, 1, 1, 2, 2], [1, 0], torch.sparse_csc), ALWAYS),
    "CSC beyond its size": (lambda: csr([0, 1, 1, 2, 2], [2, 0], torch.sparse_csc), INVALID),
    "BSR": (lambda: csr([0, 1, 2], [1, 0], torch.sparse_bsr, BLOCKS), ALWAYS),
    "BSR beyond its size": (lambda: csr([0, 1, 2], [2, 0], torch.sparse_bsr, BLOCKS), INVALID),
    "BSC": (lambda: csr([0, 1, 2], [1, 0], torch.sparse_bsc, BLOCKS), ALWAYS),
    "CSR in batches": (lambda: torch.eye(3).expand(2, 3, 3).to_sparse_csr(), ALWAYS),
    "CSR without elements": (lambda: torch.zeros(3, 3).to_sparse_csr(), ALWAYS),
    "COO without elements": (lambda: torch.zeros(3, 3).to_sparse(), ALWAYS),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    """`verify` gives the verdict of every known version of torch. The verdict for the installed version agrees with the
    result of ``torch.load``.
    """
    make, expected = FILES[name]
    path = tmp_path / "x.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = make()
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"this torch cannot make it: {error}")
        torch.save(made, path)
        why = refusal(path)
    verdict = ckptconv.verify(path, torch="all")
    assert verdict.versions and by_version(verdict.versions) == expected
    here = ckptconv.verify(path)
    assert (here.safety == "loads with weights_only=True") == (why is None), (here.safety, why)
    assert verdict.versions[".".join(torch.__version__.split(".")[:2])] == ("refused" if why else "loads")


def test_sparse_indices_that_are_too_large_to_read(tmp_path: Path) -> None:
    """More than 16 MB of sparse indices are not read. The verdict is 'not known' for the versions that compare the
    indices with the size.
    """
    path = tmp_path / "x.pt"
    n = 1 << 20
    indices = torch.arange(n)[None].expand(2, n)
    torch.save(torch.sparse_coo_tensor(indices, torch.ones(n), (n, n), check_invariants=False), path)
    versions = ckptconv.verify(path, torch="all").versions
    assert versions and by_version(versions) == (
        "not known for torch 2.6 to 2.7, loads in torch 2.8 to 2.13, not known for torch 2.14 to 2.15"
    )


def test_item_assignment_on_a_tensor(tmp_path: Path) -> None:
    """torch before 2.10 sets items of any object, even beyond its memory. The result cannot be predicted, so the
    verdict is 'not known'.
    """
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip_of(b"\x80\x02ctorch\nFloatTensor\n)RK\x07K\x00s."))
    versions = ckptconv.verify(path, torch="all").versions
    assert versions and by_version(versions) == "not known for torch 2.6 to 2.9, refused by torch 2.10 to 2.15"
    with pytest.raises(ckptconv.CkptconvError, match="refuses it"):
        ckptconv.load(path)


def test_an_exception(tmp_path: Path) -> None:
    """Only torch 2.14 has Python's exceptions on its allowlist."""
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip_of(b"\x80\x02cbuiltins\nValueError\n)R."))
    versions = ckptconv.verify(path, torch="all").versions
    assert versions
    assert by_version(versions) == "refused by torch 2.6 to 2.13, not known for torch 2.14, refused by torch 2.15"


def test_records_and_names(tmp_path: Path) -> None:
    """torch 2.7 and newer read the record of the alignment. torch 2.13 and newer treat a file with the suffix of
    safetensors as safetensors.
    """
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    path = rezip(tmp_path / "x.pt", tmp_path / "y.pt", {".storage_alignment": b"x"})
    versions = ckptconv.verify(path, torch="all").versions
    assert versions and by_version(versions) == "loads in torch 2.6, refused by torch 2.7 to 2.15"
    path = path.rename(tmp_path / "x.pt").rename(tmp_path / "x.safetensors")
    rezip(path, path, {".storage_alignment": b"64"})
    versions = ckptconv.verify(path, torch="all").versions
    assert versions and by_version(versions) == "loads in torch 2.6 to 2.12, refused by torch 2.13 to 2.15"


# Output of the commands


def test_inspect(tmp_path: Path, command: Command) -> None:
    """`inspect` gives verdicts for another version of torch, for all versions, and for an unknown version."""
    path = tmp_path / "n.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"w": nested()}, path)
    said = command("inspect", path, "--torch", NEWEST).out
    assert "no: torch.load(weights_only=True) refuses torch._utils._rebuild_nested_tensor" in said
    assert "all versions  loads in torch 2.6 to 2.14, refused by torch 2.15" in said
    assert "loads in torch 2.6 to 2.14" in command("inspect", path, "--torch", "all").out
    said = command("inspect", path, "--torch", "2.16.1").out
    assert "not known: ckptconv knows the rules of torch 2.6 to 2.15, and not those of 2.16" in said
    found = ckptconv.inspect(path, torch="2.14").torch_load
    assert (found.answer, found.torch, found.installed) == ("loads", "2.14", installed_torch())
    assert (
        json.loads(command("inspect", path, "--json", "--torch", "all").out)["torch_load"]["versions"]["2.6"] == "loads"
    )


def test_verify(tmp_path: Path, command: Command) -> None:
    """A strict `verify` checks the requested version of torch, or all known versions. An unknown version is not
    proved.
    """
    path = tmp_path / "e8.pt"
    torch.save({"w": torch.ones(2).to(torch.float16)}, tmp_path / "plain.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"w": nested()}, path)
    assert ckptconv.verify(path, strict=True, torch="2.14").ok
    assert not ckptconv.verify(path, strict=True, torch=NEWEST).ok
    ran = command("verify", path, "--strict", "--torch", "all", status=1)
    assert "not proved" in ran.out
    if torch_facts.version() < (2, 15):
        assert "got loads in torch 2.6 to 2.14, refused by torch 2.15" in ran.out
    assert ckptconv.verify(tmp_path / "plain.pt", strict=True, torch="all").ok
    said = command("verify", tmp_path / "plain.pt", "--torch", "3.0").out
    assert "not known to load" in said and "torch 3.0 (known: 2.6 to 2.15), loads in torch 2.6 to 2.15" in said
    (finding,) = ckptconv.verify(tmp_path / "plain.pt", strict=True, torch="3.0").findings
    assert finding.level == "not proved" and finding.got == "ckptconv knows the rules of torch 2.6 to 2.15 only"


def test_safetensors(tmp_path: Path, command: Command) -> None:
    """A safetensors file loads with the safetensors package, whatever the version of torch."""
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    said = command("inspect", tmp_path / "m.safetensors", "--torch", "2.9").out
    assert "torch 2.9     yes: safetensors.torch.load_file(path)" in said
    assert ckptconv.inspect(tmp_path / "m.safetensors", torch="2.9").torch_load.needs == "2.13"
    assert ckptconv.verify(tmp_path / "m.safetensors", strict=True, torch="all").ok


@pytest.mark.parametrize("word", ["new", "2", "", "v2.9"])
def test_invalid_version(word: str, fixtures: Path, command: Command) -> None:
    """An invalid version of torch is refused before a file is read."""
    for name in ("inspect", "verify"):
        assert (
            "no version of torch (expected --torch 2.9, or all"
            in command(name, "absent.pt", "--torch", word, status=2).err
        )
    with pytest.raises(UsageError, match=r"expected torch='2.9', or all"):
        ckptconv.inspect(fixtures / "cuda0.pt", torch=word)


def test_without_torch(monkeypatch: pytest.MonkeyPatch, fixtures: Path) -> None:
    """If torch is not installed, the verdict is for the newest known version."""
    monkeypatch.setattr("sys.path", [])
    assert installed_torch() is None
    assert ckptconv.verify(fixtures / "cuda0.pt").torch == NEWEST


# Vulnerabilities


def test_flaws() -> None:
    """`flaws_of` returns the known vulnerabilities of a version of torch."""
    assert flaws_of("2.5.1+cpu") == ("CVE-2025-32434", "CVE-2026-24747")
    assert flaws_of("2.6") == flaws_of("2.9.1") == ("CVE-2026-24747",)
    assert flaws_of("2.10.0") == flaws_of("3.0") == flaws_of(None) == ()


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_commands_name_flaws(name: str, fixtures: Path, command: Command) -> None:
    """`inspect` and `verify` print one line about vulnerabilities on standard error, also for several files."""
    ran = command(name, fixtures / "cuda0.pt", fixtures / "cuda0.pt", "--torch", "2.9")
    assert ran.err.count("CVE-2026-24747") == 1 and "install torch 2.10 or newer" in ran.err
    assert "CVE" not in command(name, fixtures / "cuda0.pt", "--torch", "2.10").err
    assert ckptconv.inspect(fixtures / "cuda0.pt", torch="2.9").torch_load.flaws == ("CVE-2026-24747",)


def test_load_warns_once(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` reads a file although the installed torch has a vulnerability, and warns once in a process."""
    from ckptconv.tensors import loading

    loading._warn_of_flaws.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ckptconv.load(fixtures / "cuda0.pt", map_location="cpu")
    loading._warn_of_flaws.cache_clear()
    assert [("CVE-2026-24747" in str(each.message)) for each in caught] == [True]
