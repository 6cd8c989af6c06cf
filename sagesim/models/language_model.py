"""Capture the attention of a causal language model from files in Hugging Face's layout."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sagesim.models.captures import Capture
from sagesim.models.recording import capture
from sagesim.models.sdpa_mode import SdpaCall, sdpa_calls

_COMPILED: Final = {r"_orig_mod\.": ""}
"""Renames the weights of a model that was saved while it was compiled."""

_BUFFERS: Final = re.compile(r"(^|\.)((attn|attention)\.(bias|masked_bias)|inv_freq|position_ids)$")
"""Constants that old versions of transformers saved among the weights."""

_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
"""Names in configs of the number of positions."""

_NO_LIMIT: Final = 10**9
"""Above this, a tokenizer's `model_max_length` stands for no limit."""

_FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_SHOWN: Final = 3
"""The largest number of weights that an error message lists."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The beginning of a text.

    ids: [1, n].
    title: name of the text.
    is_whole: whether the text has no more tokens.
    """

    ids: Tensor
    title: str
    is_whole: bool

    @property
    def count(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model and its tokenizer.

    positions: the largest number of tokens; None if neither model nor tokenizer says it.
    dtype: the dtype in which the checkpoint's attention computes.
    layers: names of the modules that compute attention, in order.
    unused: weights of the checkpoint beside the model, such as a value head.
    """

    path: Path
    positions: int | None
    dtype: torch.dtype
    layers: tuple[str, ...]
    unused: tuple[str, ...]
    _model: Any
    _tokenizer: Any

    @classmethod
    def load(cls, path: Path) -> LanguageModel:
        """Load a model onto the CPU. Nothing is downloaded, and no code in the folder is executed.

        The model computes in float32 if its weights are in 16 bit.

        Args:
            path: a folder with config.json, a tokenizer and safetensors weights, or a GGUF file.

        Raises:
            ValueError: if no model loads from the path; if the weights lack a weight of the model,
                or have others; if the model is quantized, is not causal, or its attention cannot
                be recorded. The message names the path.
            ModuleNotFoundError: if transformers is not installed, or the packages that read a GGUF
                file.
        """
        model, tokenizer, info = _load(path)
        _refuse_quantized(path, model)
        calls = _attention_calls(path, model)
        unused = _check_weights(path, model, info)
        dtype = calls[0].q.dtype
        if dtype in (torch.bfloat16, torch.float16):
            model.float()
        model.requires_grad_(False)
        # Gradients of the weights are not needed. The attention's are, from the embeddings on.
        model.get_input_embeddings().register_forward_hook(_require_gradient)
        return cls(
            path=path,
            positions=_positions(model, tokenizer),
            dtype=dtype,
            layers=tuple(call.name for call in calls),
            unused=unused,
            _model=model,
            _tokenizer=tokenizer,
        )

    def encode(self, text: str, tokens: int, *, title: str = "text") -> Tokens:
        """The first tokens of a text, at most `tokens`.

        Raises:
            ValueError: if the model has fewer positions than `tokens`, or the text has fewer than
                two tokens.
        """
        if self.positions is not None and tokens > self.positions:
            raise ValueError(f"{tokens} tokens: {self.path} has {self.positions} positions")
        with _quiet():
            self._tokenizer.truncation_side = "right"
            # One token more shows whether the text goes on.
            found: Any = self._tokenizer(
                text, return_tensors="pt", truncation=True, max_length=tokens + 1
            )
        ids = found["input_ids"]
        if ids.shape[1] < 2:
            raise ValueError(f"{title}: {ids.shape[1]} tokens of text; at least 2 are needed")
        return Tokens(ids[:, :tokens], title, is_whole=ids.shape[1] <= tokens)

    def check_layers(self, layers: Collection[int] | None) -> None:
        """Raise ValueError if the model has no such layer; None stands for all."""
        if missing := [n for n in layers or () if not 0 <= n < len(self.layers)]:
            raise ValueError(
                f"{self.path}: no layer {', '.join(map(str, missing))}; "
                f"the model has 0 to {len(self.layers) - 1}"
            )

    def capture(
        self,
        tokens: Tokens,
        *,
        layers: Collection[int] | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> Capture:
        """Record q, k, v and dO of each layer in one forward and backward.

        The loss is the model's own, multiplied by a power of two; see `Capture.loss_scale`. If the
        checkpoint is in 16 bit, the tensors are computed in float32 and then rounded to its dtype.

        Args:
            layers: indices of the layers to record; None records all.
            progress: called twice for each layer of the model: in the forward and in the backward.

        Raises:
            ValueError: if a layer does not exist, its tensors are not finite, or they do not fit
                the checkpoint's dtype.
        """
        self.check_layers(layers)

        def step(_call: SdpaCall, run: Callable[[], Tensor]) -> Tensor:
            def arrived(_do: Tensor) -> None:
                progress()

            o = run()
            progress()
            o.register_hook(arrived)
            return o

        # The loss is a mean over tokens, which makes dO small. Multiplying by about their number
        # gives dO the size that it would have for a single token.
        loss_scale = float(2 ** tokens.count.bit_length())
        recorded = capture(layers=layers, loss_scale=loss_scale, source=self._source(tokens))
        try:
            with _quiet(), recorded as recording, sdpa_calls(step):
                ids = tokens.ids
                loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
                (loss * loss_scale).backward()
            return recording.result().to(self.dtype)
        except (ValueError, RuntimeError, IndexError) as error:
            raise ValueError(f"{self.path}: {error}") from None

    def _source(self, tokens: Tokens) -> dict[str, str | int]:
        import transformers

        source: dict[str, str | int] = {
            "model": self.path.resolve().name,
            "architecture": type(self._model).__name__,
            "text": tokens.title,
            "tokens": tokens.count,
            "loss": "causal language model, mean over tokens",
            "transformers": str(transformers.__version__),
        }
        if self.dtype in (torch.bfloat16, torch.float16):
            source["computed in"] = "float32"
        return source


def _load(path: Path) -> tuple[Any, Any, Mapping[str, Any]]:
    """The model, the tokenizer, and how the weights fit the model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder: Path = path
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if path.is_file():
        # If one of these is missing, transformers raises no ModuleNotFoundError.
        for package in ("gguf", "accelerate"):
            importlib.import_module(package)
        folder, options["gguf_file"] = path.parent, path.name
    auto: Any = AutoModelForCausalLM
    with _quiet():
        # transformers raises almost any exception for damaged files.
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            model, info = auto.from_pretrained(
                folder,
                **options,
                use_safetensors=True,
                attn_implementation="sdpa",
                key_mapping=_COMPILED,
                ignore_mismatched_sizes=True,  # they are refused by name below
                output_loading_info=True,
            )
        except Exception as error:
            raise ValueError(f"{path}: {_reason(error)}") from None
    return model.train(False), tokenizer, info


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it needs code of its own (auto_map in its configuration), which is not executed"
    return f"no causal language model loads from it: {error or type(error).__name__}"


def _refuse_quantized(path: Path, model: Any) -> None:
    for name, x in model.named_parameters():
        if x.dtype not in _FLOATS:
            raise ValueError(f"{path}: {name} is {x.dtype}; quantized weights are not supported")


def _check_weights(path: Path, model: Any, info: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of weights beside the model. Raise ValueError if the checkpoint does not fit."""
    architecture = type(model).__name__
    missing = sorted(info["missing_keys"])
    unexpected = [key for key in sorted(info["unexpected_keys"]) if not _BUFFERS.search(key)]
    unused = [key for key in unexpected if not missing and _is_beside(model, key)]
    foreign = [key for key in unexpected if key not in unused]
    problems: list[str] = []
    if missing:
        problems.append(f"{architecture} needs {_some(missing)}, which the checkpoint lacks")
    if foreign:
        problems.append(f"the checkpoint has {_some(foreign)}, which {architecture} does not have")
    for key, found, needed in sorted(info["mismatched_keys"])[:_SHOWN]:
        problems.append(f"{key} is {tuple(found)}, {architecture} needs {tuple(needed)}")
    problems += info.get("error_msgs", [])
    if problems:
        raise ValueError(f"{path}: the weights do not fit the model: {'; '.join(problems)}")
    return tuple(unused)


def _is_beside(model: Any, key: str) -> bool:
    """Whether a weight belongs to a module beside the model, such as a value head."""
    top, dot, _ = key.partition(".")
    return bool(dot) and not any(
        top == model.base_model_prefix or hasattr(module, top)
        for module in (model, model.base_model)
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _attention_calls(path: Path, model: Any) -> list[SdpaCall]:
    """The attention calls of a forward of two tokens.

    Raises:
        ValueError: if there is none, or one cannot be recorded, or lets the first token attend to
            the second.
    """
    calls: list[SdpaCall] = []

    def keep(call: SdpaCall, run: Callable[[], Tensor]) -> Tensor:
        calls.append(call.supported())
        return run()

    try:
        with _quiet(), torch.no_grad(), sdpa_calls(keep):
            model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except Exception as error:  # the code of any architecture runs here
        raise ValueError(f"{path}: the model does not run: {error}") from None
    if not calls:
        raise ValueError(f"{path}: its attention does not call scaled_dot_product_attention")
    for call in calls:
        mask = call.attn_mask
        if not (call.is_causal or (mask is not None and not mask[..., 0, 1].any())):
            raise ValueError(
                f"{path}: not a causal language model: tokens attend to later ones at {call}"
            )
    return calls


def _positions(model: Any, tokenizer: Any) -> int | None:
    """The largest number of tokens that both the model and the tokenizer say."""
    config = model.config.get_text_config()
    limits: Iterable[Any] = [getattr(config, name, None) for name in _POSITIONS]
    known = [n for n in (*limits, tokenizer.model_max_length) if isinstance(n, int) and n > 0]
    return min((n for n in known if n < _NO_LIMIT), default=None)


def _require_gradient(_module: Any, _args: Any, output: Tensor) -> Tensor:
    return output if output.requires_grad else output.detach().requires_grad_()


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Switch off the progress bars and warnings of transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
