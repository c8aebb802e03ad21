"""What is installed decides which fused kernels are used, and finding out imports none of it."""

import sys
from pathlib import Path

import pytest

from megatron_a3po.actor.fusions import detect_fusions

MODULES = ("transformer_engine", "apex", "fused_weight_gradient_mlp_cuda")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where the fused libraries can be found; whatever is installed beside the tests is hidden."""
    kept = [entry for entry in sys.path if not any((Path(entry) / name).exists() for name in MODULES)]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *kept])
    return tmp_path


def install(site: Path, module: str, version: str | None = None) -> None:
    """A module that fails when it is imported, and what an installer writes beside it."""
    (site / module).mkdir()
    (site / module / "__init__.py").write_text("raise AssertionError('detection imports nothing')\n")
    if version:
        information = site / f"{module}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n")


def test_with_nothing_installed_the_layers_and_the_optimizer_are_torchs(site: Path) -> None:
    fusions = detect_fusions()
    assert fusions.transformer_engine is None and not fusions.gradient_accumulation
    assert "torch AdamW" in fusions.optimizer
    text = "\n".join(fusions.lines())
    assert "Transformer Engine is not installed" in text and "apex" in text and "not fused" in text


@pytest.mark.parametrize(("version", "parsed"), [("2.20.2", (2, 20)), ("2.3", (2, 3)), ("2.4.0+cu13.abc", (2, 4))])
def test_transformer_engine_brings_layers_and_optimizer_and_names_its_version(
    site: Path, version: str, parsed: tuple[int, int]
) -> None:
    install(site, "transformer_engine", version)
    fusions = detect_fusions()
    assert fusions.transformer_engine == parsed
    assert "Transformer Engine" in fusions.optimizer
    # Its own fused gradient accumulation does not help: Megatron's output layer asks for apex's extension.
    assert not fusions.gradient_accumulation
    layers, _, accumulation = fusions.lines()
    assert f"{parsed[0]}.{parsed[1]}" in layers and "not fused" in accumulation


def test_apex_alone_brings_the_optimizer_and_only_its_extension_the_gradient_accumulation(site: Path) -> None:
    install(site, "apex")
    fusions = detect_fusions()
    assert fusions.transformer_engine is None and "apex" in fusions.optimizer
    assert not fusions.gradient_accumulation

    install(site, "fused_weight_gradient_mlp_cuda")
    fusions = detect_fusions()
    assert fusions.gradient_accumulation and "not fused" not in list(fusions.lines())[-1]

    install(site, "transformer_engine", "2.20.2")  # whose optimizer goes before apex's, as in Megatron
    fusions = detect_fusions()
    assert "Transformer Engine" in fusions.optimizer and fusions.gradient_accumulation
    assert not [name for name in MODULES if name in sys.modules]
