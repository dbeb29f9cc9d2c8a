"""What a pipeline decides before and after its stages. The stages are stand-ins that leave a folder a run would leave."""

from pathlib import Path

import pytest
from pipeline_runs import SETTINGS, place

from lowbit.configs.compose import compose_for
from lowbit.configs.overrides import PIPELINE
from lowbit.configs.schema import RunConfig
from lowbit.configs.schema_pipeline import PipelineConfig, Stage
from lowbit.configs.stored import save_config
from lowbit.data.dataset import prepare_data
from lowbit.pipeline import manifest as store
from lowbit.pipeline.run import run


def composed(*overrides: str) -> PipelineConfig:
    config: PipelineConfig = compose_for(PIPELINE, [*SETTINGS, *overrides])
    return config


class Leaving:
    """In place of a stage: leaves weights, a configuration and a tokenizer, and remembers its folder."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, stage: Stage, run: RunConfig, folder: Path) -> None:
        self.made.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        save_config(run, folder / "config.yaml")
        (folder / "model.safetensors").write_text(f"weights of {folder.name}")
        tokens = prepare_data(run.data, lambda _: None).tokenizer if run.data.sources else None
        if tokens is not None:
            tokens.save(folder / "tokenizer")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline's folder that is not there yet, beside documents."""
    monkeypatch.chdir(place(tmp_path))
    return tmp_path / "runs" / "pipeline"


def test_stages_that_read_other_documents_have_other_data(folder: Path) -> None:
    """The digests are those of the data sets opened alone."""
    config = composed("stages=[pretrain,distill]", "distill.data.held_out=0.4", "distill.data.prefetch=0")
    made = run(config, folder, Leaving())
    alone = {stage: prepare_data(getattr(config, stage).data, lambda _: None).fingerprint for stage in config.stages}
    assert {stage: record.inputs["data"] for stage, record in made.stages.items()} == alone
    assert alone[Stage.pretrain] != alone[Stage.distill]
    assert store.read(folder).stages == made.stages
