"""A training step beside litgpt's GPT with the same weights; by name, in an environment without
transformers: see README.md.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.measure import Row
from benchmarks.training import Peer, step_rows
from llm_course.model.decoder import DecoderModel
from llm_course.model.pretrained import save_pretrained


def lit_gpt(model: DecoderModel) -> nn.Module:
    """The same weights in litgpt's own class, put there by its own converter of Llama's."""
    from litgpt import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

    config = model.config
    peer = GPT(
        Config(
            block_size=config.max_position_embeddings,
            padded_vocab_size=config.vocab_size,
            n_layer=config.num_layers,
            n_embd=config.hidden_size,
            n_head=config.num_heads,
            n_query_groups=config.num_kv_heads or config.num_heads,
            intermediate_size=config.intermediate_size,
            mlp_class_name="LLaMAMLP",
            norm_class_name="RMSNorm",
            norm_eps=config.rms_norm_eps,
            rotary_percentage=1.0,
            rope_base=int(config.rope_theta),
            bias=False,
            parallel_residual=False,
        )
    )
    weights: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        saved = load_file(Path(save_pretrained(model, f"{folder}/model")) / "model.safetensors")
    copy_weights_hf_llama(peer.config, {}, weights, saved)
    peer.load_state_dict(weights)
    return peer


def their_loss(ids: Tensor, labels: Tensor) -> Callable[[nn.Module], Tensor]:
    """The mean loss of litgpt's model on a batch, as its pretraining takes it."""
    from litgpt.utils import chunked_cross_entropy

    return lambda model: chunked_cross_entropy(model(ids), labels)


def rows(*, full: bool) -> Iterator[Row]:
    return step_rows(Peer("litgpt", lit_gpt, their_loss, {}), full=full)
