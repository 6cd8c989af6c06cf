"""What the kernels support, and the errors for what they do not."""

from dataclasses import replace

import pytest
import torch

from sagesim import (
    CAUSAL_SAFE,
    FACTORED,
    FP8_GRADIENTS,
    FPA,
    FPA_FP16,
    PRESETS,
    SAGEBWD,
    SITES,
    AttentionSpec,
    Granularity,
    Precision,
    Smoothing,
    with_precision,
)
from sagesim_kernels import Support, attention, supports
from sagesim_kernels.target import device_reason
from tests.support.kernels import DEVICE, DTYPES, HERE, kernel_case, run_kernels

pytestmark = HERE

ON_CPU = DEVICE == "cpu"


class TestSupports:
    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_every_preset_but_full_precision(self, name):
        assert bool(supports(PRESETS[name])) is (name != "fpa"), supports(PRESETS[name])

    @pytest.mark.parametrize("site", SITES)
    @pytest.mark.parametrize("precision", [Precision.FP8_E4M3, Precision.FP8_E5M2, Precision.FP32])
    def test_precisions_without_kernels_are_named_with_their_site(self, site, precision):
        answer = supports(with_precision(SAGEBWD, precision, site))
        assert not answer
        assert f"site {site}" in str(answer) and precision.value in str(answer)

    @pytest.mark.parametrize("site", SITES)
    @pytest.mark.parametrize("side", ["lhs", "rhs"])
    def test_scales_without_kernels_are_named_with_their_site(self, site, side):
        """A scale for a head or a row would need a pass over all tokens first."""
        matmul = with_precision(SAGEBWD, Precision.INT8).site(site)
        wide = Granularity.PerRow if getattr(matmul, side).is_map else Granularity.PerHead
        spec = replace(SAGEBWD, **{site: replace(matmul, **{side: wide})})
        answer = supports(spec)
        assert not answer
        assert f"site {site}" in str(answer) and f"per {wide.value}" in str(answer)
        assert supports(with_precision(spec, Precision.INPUT16, site)), (
            "granularities of 16 bit are ignored"
        )

    @pytest.mark.parametrize("site", ["dv", "dq", "dk"])
    def test_scales_from_bounds(self, site):
        left = "p" if site == "dv" else "ds"
        for precision in ("fp8_e4m3", "fp8_e5m2", "int8"):
            for right in ("block", "block_channel"):
                word = f"{site}={precision}@row_bound,{right}"
                assert supports(AttentionSpec.parse(f"factored {word}"))
            for right in ("head", "token", "channel"):
                spec = AttentionSpec.parse(f"factored {site}={precision}@row_bound,{right}")
                assert f"per {right}" in str(supports(spec))
        for precision in ("fp8_e4m3", "fp8_e5m2"):
            spec = AttentionSpec.parse(f"factored {site}={precision}@tile,block")
            wanted = f"site {site}: {left} per tile in {precision}; the kernels have row_bound"
            assert str(supports(spec)) == wanted

    def test_long_blocks(self):
        """A sum of INT8 codes and a scale of a tile need the whole block."""
        assert supports(FP8_GRADIENTS) and FP8_GRADIENTS.block_q == 256
        for word, wanted in {
            "dv=int8": "site dv: int8 with block_q=256",
            "dk=int8": "site dk: int8 with block_q=256",
            "dq=int8@tile,block": "site dq: int8 with block_q=256",
            "dq=int8": "yes",
            "dq=int8@tile_row,block": "yes",
            "dv=fp16": "yes",
        }.items():
            assert str(supports(AttentionSpec.parse(f"fp8_gradients {word}"))).startswith(wanted)
        spec = AttentionSpec.parse("fp8_gradients dv=int8@row_bound,block_channel block=64x64")
        assert supports(spec)

    @pytest.mark.parametrize("block", ["block_q", "block_k"])
    @pytest.mark.parametrize("size", [1, 16, 48, 256, 512])
    def test_blocks(self, block, size):
        """Tiles of SAGEBWD have scales, so that they must not have 256 queries either."""
        answer = supports(replace(SAGEBWD, **{block: size}))
        assert not answer and f"{block}={size}" in str(answer)
        for good in (32, 64, 128):
            assert supports(replace(SAGEBWD, **{block: good}))

    @pytest.mark.parametrize("head_size", [0, -1, 257, 512])
    def test_head_sizes(self, head_size):
        answer = supports(SAGEBWD, head_size=head_size)
        assert not answer and f"head size {head_size}" in str(answer)

    @pytest.mark.parametrize("head_size", [1, 40, 256])
    @pytest.mark.parametrize("dtype", [None, *DTYPES])
    def test_yes(self, head_size, dtype):
        answer = supports(FACTORED, head_size=head_size, dtype=dtype)
        assert answer and str(answer) == "yes" and answer == Support(None)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
    def test_dtypes(self, dtype):
        assert str(dtype) in str(supports(SAGEBWD, dtype=dtype))

    @pytest.mark.parametrize("head_size", ["64", 64.5, True, torch.tensor(64)])
    def test_head_sizes_that_are_no_integers(self, head_size):
        with pytest.raises(TypeError, match=r"head_size is .*; it must be an integer or None"):
            supports(SAGEBWD, head_size=head_size)

    @pytest.mark.parametrize("spec", ["sagebwd", None, SAGEBWD.qk])
    def test_a_spec_that_is_not_an_attention_spec(self, spec):
        with pytest.raises(TypeError, match=r"AttentionSpec\.parse"):
            supports(spec)

    @pytest.mark.parametrize(
        "spec",
        [
            CAUSAL_SAFE,
            with_precision(SAGEBWD, Precision.INT8),
            replace(SAGEBWD, smoothing=Smoothing(q=True), block_q=128, block_k=32),
            AttentionSpec.parse("factored dk=fp16 qk_recompute=fp16"),
            with_precision(FPA_FP16, Precision.INT8, "dp"),
            FP8_GRADIENTS,
        ],
        ids=lambda spec: spec.label(),
    )
    def test_yes_means_that_it_runs(self, spec):
        assert supports(spec)
        assert run_kernels(kernel_case(seed=0, n_q=20, n_k=33, d=16), spec).dq.any()


@pytest.mark.parametrize(
    ("capability", "hip", "words"),
    [
        ((7, 5), None, "Card has compute capability 7.5; the kernels need 8.0 or higher"),
        ((9, 0), "6.4", "Card is a GPU of AMD's; the kernels run on NVIDIA GPUs"),
        ((8, 0), None, None),
        ((12, 0), None, None),
    ],
)
def test_gpus_without_kernels(capability, hip, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert device_reason(0) == words


class TestRefusals:
    """Each error names the value at fault, and no kernel is launched."""

    Q = torch.zeros(2, 3, 8, device=DEVICE)

    @pytest.fixture(autouse=True)
    def nothing_is_launched(self, monkeypatch):
        def launched(*_: object) -> None:
            raise AssertionError("a kernel was launched")

        monkeypatch.setattr("sagesim_kernels.ops.forward", launched)

    def refuse(self, error, words, q=Q, k=Q, v=Q, **options):
        with pytest.raises(error) as raised:
            attention(q, k, v, **options)
        for word in words:
            assert word in str(raised.value), raised.value

    def test_a_launch_would_be_seen(self):
        self.refuse(AssertionError, ["launched"])

    def test_specs(self):
        self.refuse(ValueError, ["site qk", "fp32"], spec=FPA)
        self.refuse(ValueError, ["block_q=16"], spec=replace(SAGEBWD, block_q=16))
        fp8 = with_precision(SAGEBWD, Precision.FP8_E4M3, "dv")
        self.refuse(ValueError, ["site dv", "fp8_e4m3"], spec=fp8)

    @pytest.mark.parametrize("spec", ["sagebwd", None])
    def test_a_spec_that_is_not_an_attention_spec(self, spec):
        self.refuse(TypeError, [repr(spec), "AttentionSpec.parse"], spec=spec)

    @pytest.mark.parametrize("head", ["q", "v"])
    def test_head_sizes(self, head):
        wide = torch.zeros(2, 3, 257, device=DEVICE)
        tensors = {"q": wide, "k": wide} if head == "q" else {"v": wide}
        self.refuse(ValueError, ["head size 257", "256"], **tensors)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
    def test_dtypes_that_are_not_floats(self, as_installed, dtype):
        x = self.Q.to(dtype)
        self.refuse(ValueError, [str(dtype), "float16"], q=x, k=x, v=x)

    @pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.nn.Parameter(torch.ones(()))])
    def test_a_scale_that_would_get_no_gradient(self, as_installed, scale):
        self.refuse(TypeError, ["scale", "torch.float32", "number"], scale=scale)

    def test_integers_under_autocast(self, as_installed):
        x = self.Q.long()
        with torch.autocast(DEVICE, torch.float16):
            self.refuse(ValueError, ["torch.int64", "float16"], q=x, k=x, v=x)

    def test_float64(self):
        x = self.Q.double()
        self.refuse(TypeError, ["torch.float64", "float32"], q=x, k=x, v=x)

    def test_dtypes_that_differ(self):
        self.refuse(TypeError, ["torch.float32", "torch.float16"], k=self.Q.half())

    def test_devices_that_differ(self):
        self.refuse(ValueError, ["meta", DEVICE], v=self.Q.to("meta"))

    @pytest.mark.parametrize("other", ["meta", "cuda" if ON_CPU else "cpu"])
    def test_devices_without_kernels(self, other):
        if other == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        x = self.Q.to(other)
        self.refuse(ValueError, [other, "CUDA" if not ON_CPU else "CPU"], q=x, k=x, v=x)

    @pytest.mark.parametrize(
        ("q", "k", "v", "words"),
        [
            ((8,), (3, 8), (3, 8), ["(8,)"]),
            ((2, 3, 8), (2, 3, 9), (2, 3, 8), ["head sizes", "(2, 3, 9)"]),
            ((2, 3, 0), (2, 3, 0), (2, 3, 8), ["head size 0"]),
            ((2, 3, 8), (2, 3, 8), (2, 3, 0), ["head size 0"]),
            ((2, 3, 8), (2, 4, 8), (2, 3, 8), ["k and v", "(2, 4, 8)"]),
            ((2, 3, 8), (1, 3, 8), (1, 3, 8), ["enable_gqa=True", "(1, 3, 8)"]),
            ((2, 3, 8), (3, 8), (3, 8), ["batch axes", "(3, 8)"]),
            ((2, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8), ["batch axes", "(1, 2, 3, 8)"]),
        ],
    )
    def test_shapes(self, q, k, v, words):
        q, k, v = (torch.zeros(shape, device=DEVICE) for shape in (q, k, v))
        self.refuse(ValueError, words, q=q, k=k, v=v)

    @pytest.mark.parametrize("kv_heads", [0, 2, 4])
    def test_heads_that_do_not_group(self, kv_heads):
        q, k = (torch.zeros(h, 3, 8, device=DEVICE) for h in (3, kv_heads))
        self.refuse(ValueError, ["multiple", "(3, 3, 8)"], q=q, k=k, v=k, enable_gqa=True)

    def test_masks_and_dropout(self):
        """Arguments that are not supported raise an error instead of being ignored."""
        mask = torch.ones(3, 3, dtype=torch.bool, device=DEVICE)
        self.refuse(ValueError, ["attn_mask"], attn_mask=mask)
        self.refuse(ValueError, ["attn_mask"], attn_mask=mask.float())
        self.refuse(ValueError, ["dropout_p=0.1"], dropout_p=0.1)

    @pytest.mark.parametrize(
        "option", ["mask", "causal", "dropout", "softmax_scale", "window_size"]
    )
    def test_unknown_arguments(self, option):
        self.refuse(TypeError, [option], **{option: 1})

    def test_positional_options(self):
        with pytest.raises(TypeError, match="positional"):
            attention(self.Q, self.Q, self.Q, True)

    def test_words(self):
        self.refuse(ValueError, ["'NDH'", "'HND'", "'NHD'"], layout="NDH")
        self.refuse(
            ValueError, ["'bottom_right'", "'lower_right'"], causal_alignment="bottom_right"
        )

    def test_tokens_before_heads_need_both(self):
        x = torch.zeros(3, 8, device=DEVICE)
        self.refuse(ValueError, ["'NHD'", "(3, 8)"], q=x, k=x, v=x, layout="NHD")
