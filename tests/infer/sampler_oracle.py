"""What engines are held against: whole forwards, one row at a time, and the models of these tests."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from llama_names import llama_name
from torch import Tensor

from lowbit.configs.schema import ModelConfig, MoeConfig
from lowbit.configs.schema_model import head_dim_of
from lowbit.infer.lines import NOISE, PROMPT, STORED, TABLE, TOKEN, Begun
from lowbit.infer.requests import Request, Sample
from lowbit.infer.sampling import SamplingConfig, choose, sampling_logprobs, uniforms
from lowbit.models.layers import weights_and_state
from lowbit.models.lm_head import lm_head_logits
from lowbit.models.transformer import Transformer

CONFIG = ModelConfig(layers=3, width=32, heads=4, kv_heads=2, mlp_width=48, max_sequence=48, init_std=0.2)
VOCAB = 60
LAYOUTS: dict[str, dict[str, object]] = {
    "plain": {},
    "local": {"windows": [3, 0]},
    "shared": {"kv_from": [0, 0, 2]},
    "shared local": {"kv_from": [0, 0, 2], "windows": [5, 0, 2]},
    "experts": {"moe": MoeConfig(experts=4, expert_width=16)},
    "softcap": {"logit_softcap": 2.0},
    "attention softcap": {"attention_softcap": 0.7, "windows": [6, 0], "kv_from": [0, 0, 2]},
    "one key": {"kv_heads": 1, "tied_head": True},
}


def model_of(dtype: torch.dtype = torch.float32, seed: int = 4, **changes: object) -> Transformer:
    model = Transformer(dataclasses.replace(CONFIG, **changes), VOCAB, dtype)  # type: ignore[arg-type]
    model.init_weights(seed)
    return model


@torch.no_grad()
def logits_of(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """FP32 [tokens, vocabulary], by a forward over all of them."""
    hidden = model(torch.tensor([list(tokens)], device=model.head_weight.device))[0].float()
    head = model.head_weight.to(model.compute_dtype).float()
    return lm_head_logits(hidden, head, vocab_size=VOCAB, softcap=model.config.logit_softcap).cpu()


def noise_of(seed: int, key: int, sample: int, position: int) -> Tensor:
    """FP64 [1]."""
    return uniforms(seed, *(torch.tensor([n]) for n in (key, sample, position)))


def recomputed(
    model: Transformer, request: Request, sample: int, sampling: SamplingConfig, seed: int, stops: set[int]
) -> Sample:
    """One sample, by a forward over everything for each token."""
    tokens, logprobs = list(request.prompt), []
    for _ in range(request.max_new_tokens):
        noise = noise_of(seed, request.key, sample, len(tokens))
        token, logprob = choose(logits_of(model, tokens)[-1:], sampling, noise)
        tokens.append(int(token))
        logprobs.append(float(logprob))
        if tokens[-1] in stops:
            break
    new = tokens[len(request.prompt) :]
    return Sample(new, logprobs, "stop" if new[-1] in stops else "length", [0] * len(new))


def logprobs_of(model: Transformer, request: Request, sample: Sample, sampling: SamplingConfig) -> Tensor:
    """FP32 [tokens]: of a sample's tokens, by one forward over all of it."""
    logits = logits_of(model, [*request.prompt, *sample.tokens])[len(request.prompt) - 1 : -1]
    return sampling_logprobs(logits, sampling).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]


def transformers_twin(model: Transformer) -> Any:
    """transformers' Qwen3 with our weights, FP32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = model.config
    twin = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=head_dim_of(config),
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied_head,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            attn_implementation="eager",
        )
    )
    state = {}
    for name, tensor in weights_and_state(model).items():
        name = llama_name(name)
        state[name] = tensor[:VOCAB] if "lm_head" in name or "embed" in name else tensor
    twin.load_state_dict(state, strict=True)
    return twin.eval()


def begun_as_written(lines: Tensor, noise: Tensor, rope: tuple[Tensor, Tensor], blocks: int, block: int) -> Begun:
    """See `kernels.begin_step`."""
    stored, table = lines[:, STORED], lines[:, TABLE : TABLE + blocks]
    which = (stored // block).clamp(max=blocks - 1)
    places = table.gather(1, which[:, None])[:, 0] * block + stored % block
    drawn = (stored + 1 - lines[:, PROMPT]).clamp(0, noise.shape[1] - 1)
    cos, sin = (every.view(-1, every.shape[-1])[stored][:, None, None] for every in rope)
    return Begun(places, (cos, sin), noise[lines[:, NOISE], drawn])


def ended_as_written(lines: Tensor, values: Tensor) -> None:
    """See `kernels.end_step`."""
    lines[:, TOKEN] = values[:, 0].long()
    lines[:, STORED] += lines[:, PROMPT] > 0
