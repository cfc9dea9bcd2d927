"""The demo checkpoint of latent attention and experts: transformers loads it, it answers from its context, and it fails
when a latent block is wrong."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from kvmesh.cli.models import DEMOS, resolve  # noqa: E402
from scripts.demo_corpus import heldout  # noqa: E402
from scripts.demo_deepseek import DeepseekV3  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402
from tests.test_demo_model import SEED, Damage, Loaded, recall, shift, zero  # noqa: E402

FOLDER = ROOT / "examples" / "demo-moe"


@pytest.fixture(scope="module")
def moe() -> Loaded:
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return Loaded(model.eval(), transformers.AutoTokenizer.from_pretrained(FOLDER))


def test_its_name_is_enough() -> None:
    assert resolve("demo-moe") == FOLDER
    assert [resolve(name) for name in DEMOS] == [resolve(""), FOLDER]


def test_transformers_computes_what_was_trained(moe: Loaded) -> None:
    assert type(moe.model).__name__ == "DeepseekV3ForCausalLM"
    weights = load_file(FOLDER / "model.safetensors")
    trained = DeepseekV3(moe.model.config.vocab_size)
    trained.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    ids = torch.randint(3, moe.model.config.vocab_size, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs, ours = moe.model(ids).logits[0], trained.eval()(ids, torch.ones_like(ids, dtype=torch.bool))
    assert float((theirs - ours).abs().max()) < 1e-3 * float(ours.abs().max())


@pytest.mark.slow
def test_recall_on_held_out_facts(moe: Loaded) -> None:
    assert recall(moe, heldout(SEED, 100)) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("damage", [zero, shift])
def test_one_wrong_latent_block_shows_as_wrong_answers(moe: Loaded, damage: Damage) -> None:
    assert recall(moe, heldout(SEED, 40), damage) < 0.3


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 8 * 1024 * 1024
