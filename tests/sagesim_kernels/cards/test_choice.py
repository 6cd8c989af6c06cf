"""The recommended spec of a GPU, from its properties."""

import json
from types import SimpleNamespace

import pytest
import torch

from sagesim.spec import FACTORED, FACTORED_QK, FPA_BF16, FPA_FP16, PRESETS
from sagesim_kernels import default_spec, supports
from sagesim_kernels.cards import CARDS, RECOMMENDED, card_class, choice, recommended

CLASSES = json.loads(RECOMMENDED.read_text(encoding="utf-8"))["classes"]


def gpu(name: str, major: int, minor: int) -> SimpleNamespace:
    return SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=1)


RTX_4090 = gpu("NVIDIA GeForce RTX 4090", 8, 9)


def test_a_geforce_is_a_consumer_card():
    assert card_class(RTX_4090) == "8.9 consumer"
    assert card_class(gpu("NVIDIA L40S", 8, 9)) == "8.9 data centre"
    assert card_class(gpu("NVIDIA RTX 6000 Ada Generation", 8, 9)) == "8.9 data centre"


def test_every_card_has_a_recommendation_that_the_kernels_compute():
    for card in CARDS.values():
        name = f"NVIDIA GeForce {card.name}" if card.is_consumer else f"NVIDIA {card.name}"
        properties = gpu(name, *card.capability)
        spec = recommended(properties)
        assert spec == PRESETS[CLASSES[card_class(properties)]["spec"]]
        assert supports(spec) or "on a CPU" in str(supports(spec))


def test_16_bit_is_that_of_the_inputs(monkeypatch: pytest.MonkeyPatch):
    table = {"8.9 consumer": {"spec": "fpa_bf16"}}
    monkeypatch.setattr(choice, "_table", lambda: table)
    assert recommended(RTX_4090) == FPA_BF16
    assert recommended(RTX_4090, torch.float16) == FPA_FP16
    table["8.9 consumer"]["spec"] = "factored"
    assert recommended(RTX_4090, torch.float16) == FACTORED


def test_other_gpus_get_the_default_preset():
    assert recommended(gpu("NVIDIA B200", 10, 0)) == FACTORED_QK
    assert recommended(gpu("NVIDIA A40", 8, 6)) == FACTORED_QK


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_other_devices_are_refused(device: str | torch.device):
    with pytest.raises(ValueError, match=r"CUDA devices, not (cpu|meta)"):
        default_spec(device)


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in (None, 0, "cuda"):
        with pytest.raises(ValueError, match="PyTorch sees none"):
            default_spec(device)


@pytest.mark.parametrize(
    ("device", "asked"),
    [(None, None), (1, torch.device("cuda", 1)), ("cuda:1", torch.device("cuda", 1))],
)
def test_the_device_is_asked_for_its_properties(
    monkeypatch: pytest.MonkeyPatch, device: object, asked: object
):
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda chosen: seen.append(chosen) or RTX_4090
    )
    assert default_spec(device) == recommended(RTX_4090)  # pyright: ignore[reportArgumentType]
    assert seen == [asked]
