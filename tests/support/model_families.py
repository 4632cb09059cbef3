"""Every family that transformers lists for causal language models: built tiny from its config, and taken to a
plan by `kvcal plan` as it is, with its default recipe, and to generated tokens; where that is refused, by the
recipe that the error's hint names.

    python tests/support/model_families.py [FAMILY ...] [--out docs/families.json]

prints a line for each family and the counts. A config is made tiny by the names of its sizes; a family whose
config takes no such sizes, or needs other inputs than token ids, is "not built". Weights are random: nothing
is said about a model's quality.
"""

import argparse
import inspect
import json
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from cli_cases import Outcome, run_kvcal
from predictor_runs import sequences
from tiny_models import perturbed
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from kvcal import PlanCache
from kvcal.cache.attached import attached_for
from kvcal.embedded import model_folder
from kvcal.errors import UnsupportedModel
from kvcal.geometry import StateGeometry
from kvcal.models.load import load
from kvcal.models.supported_layers import geometry_of
from kvcal.plan.plan import Plan, load_plan
from kvcal.recipe_files import recipe_names

VOCABULARY, CONTEXT = 4096, 512
SECONDS = 120
BITS = 9.0  # heads have 16 channels, so that scales alone are 2 bits a value
MOST_PARAMETERS = 25_000_000
# Sizes by the names that configs have for them.
SIZES: dict[int, str] = {
    64: "hidden_size d_model n_embd embed_dim word_embed_proj_dim emb_dim hidden_dim n_inner intermediate_size ffn_dim"
    " decoder_ffn_dim encoder_ffn_dim d_ff d_inner moe_intermediate_size shared_expert_intermediate_size"
    " shared_intermediate_size shared_experts_intermediate_size dense_intermediate_size intermediate_size_mlp"
    " expert_ffn_hidden_size ffn_hidden_size attention_hidden_size embedding_size lru_width dff dim_ff"
    " moe_shared_expert_intermediate_size feed_forward_size mamba_d_ssm input_embedding_size output_embedding_size"
    " backbone_hidden_size router_hidden_size",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers"
    " num_decoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"
    " num_encoder_attention_heads num_decoder_attention_heads attention_heads num_experts num_local_experts"
    " n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads linear_num_heads"
    " swa_num_attention_heads index_n_heads n_mamba_heads num_blocks",
    2: "num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads linear_num_key_heads"
    " num_experts_per_tok num_experts_per_token moe_topk moe_k mamba_expand expand n_group",
    1: "topk_group first_k_dense_replace mamba_n_groups n_groups mamba_ngroups num_dense_layers n_shared_experts"
    " num_shared_experts moe_num_shared_experts",
    16: "head_dim v_head_dim kv_lora_rank q_lora_rank linear_key_head_dim linear_value_head_dim linear_head_dim"
    " mamba_d_head mamba_head_dim mamba_headdim swa_head_dim dim_head d_head kv_channels attention_head_dim"
    " query_pre_attn_scalar index_head_dim attention_head_size hidden_size_per_layer_input laurel_rank",
    8: "qk_rope_head_dim qk_nope_head_dim mamba_d_state state_size ssm_state_size rotary_dim mamba_dt_rank"
    " time_step_rank adapter_rank mamba_chunk_size",
    24: "qk_head_dim",
    CONTEXT: "max_position_embeddings n_positions max_seq_len model_max_length n_ctx context_length"
    " max_target_positions max_source_positions original_max_position_embeddings",
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size",
    0: "pad_token_id",
    3: "bos_token_id decoder_start_token_id",
}
FLAGS = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False, "eos_token_id": None}
TINY = {name: size for size, names in SIZES.items() for name in names.split()} | FLAGS
# What single families need besides: sizes that have to fit each other, and full attention in some layer.
_HEADS = {"num_key_value_heads": 4}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR, "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1, 3]}, "gemma3_text": _SLIDING,
    "gemma3n_text": _SLIDING | {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]}, "granitemoehybrid": _LINEAR | {"mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}, "kimi_linear": _LINEAR, "kolibri1": _SLIDING,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2}, "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": _SLIDING, "mistral": {"sliding_window": None},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 32)},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2}, "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """``outcome``: "supported", "refused" by kvcal, or "not built". ``layers``: such as "full and sliding";
    ``recipe``: of its plan; ``reason``: why it is refused, or has another recipe than the default one;
    ``is_decoder``: whether its config.json has to say so, since models of this type are encoders
    otherwise."""

    model_type: str
    model_class: str
    outcome: str
    layers: str
    recipe: str
    reason: str
    is_decoder: bool = False


class Refused(Exception):
    """No recipe that kvcal names serves the family."""


class TooLong(BaseException):
    """A family took more than SECONDS."""


def tiny_config(kind: type[hf.PreTrainedConfig]) -> hf.PreTrainedConfig:
    """A config with small sizes, in its parts, too; raises what the config raises where they do not fit."""
    names = set(inspect.signature(kind.__init__).parameters)
    names |= {name for one in kind.__mro__ for name in getattr(one, "__annotations__", ())}
    names -= {name for name in names if isinstance(getattr(kind, name, None), property)}
    given: dict[str, Any] = {name: value for name, value in TINY.items() if name in names}
    given |= {name: tiny_config(part) for name, part in kind.sub_configs.items() if hasattr(part, "sub_configs")}
    if "kv_lora_rank" in names:
        given |= _HEADS  # a latent is expanded to all query heads
    return kind(**given | OWN.get(kind.model_type, {}))


def tiny_model(model_type: str, is_decoder: bool = True) -> hf.PreTrainedModel:
    """Random weights, far from initialisation. ValueError for a model that stays large."""
    config = tiny_config(hf.CONFIG_MAPPING[model_type])
    config.is_decoder = is_decoder
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in hf.AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters with all sizes that are known to be small")
    torch.manual_seed(0)
    model = perturbed(hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32), 0.05)
    with torch.no_grad():
        model(input_ids=torch.full((1, 4), 5))
    return model


def planned(folder: Path) -> tuple[str, str, str]:
    """The plan that `kvcal plan` makes of the model: the kinds of layers, the plan's recipe, and why that is another
    than the default one, "" if it is not. Refused where the recipe that the error's hint names does not serve
    it, either."""
    out, given = folder / "out", ("--data", "tasks", "--samples", 2, "--seq-len", 256, "--json", "--quiet")
    plan = ("plan", folder, "--batch", 8, "--context", CONTEXT, "--out", out, *given)
    done, reason = run_kvcal(*plan, "--bits", BITS), ""
    if done.code and "smallest_bytes" in (refusal := refusal_of(done)):  # 16 channels a head: the least is above
        done = run_kvcal(*plan, "--kv-budget", refusal["smallest_bytes"])
    if done.code:
        refusal = refusal_of(done)
        reason = refusal["message"]
        names = [word for word in re.findall(r"[\w-]+", refusal["hint"] or "") if word in recipe_names()]
        if not names:
            raise Refused(reason)
        done = run_kvcal("run", names[0], "--model", folder, "--out", out, *given)
        if done.code:
            raise Refused(reason if refusal_of(done)["kind"] == "UnsupportedModel" else refusal_of(done)["message"])
    path = Path(done.json["plan"]) if not reason else out / "plan.safetensors"
    made = load_plan(path)
    if not any(layer.is_paged for layer in made.layers):
        raise Refused(reason)
    return generated(folder, made), str(made.provenance["recipe"]), reason


def refusal_of(done: Outcome) -> dict[str, Any]:
    """The error of a command with --json, the last line on stderr."""
    found: dict[str, Any] = json.loads(done.err.splitlines()[-1])["error"]
    return found


def generated(folder: Path, plan: Plan) -> str:
    """Generates through the plan's cache; the kinds of layers. AssertionError: other bytes than predicted."""
    loaded = load(str(folder), device="cpu")
    model, prompt = loaded.model, sequences([300], 2, vocab_size=VOCABULARY).sequences[0][None]
    cache, mask = PlanCache(plan, model.config), torch.ones_like(prompt)
    with attached_for(model, plan):
        model.generate(prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert cache.lengths == [305] and cache.nbytes == plan.nbytes([305]), "other bytes than the plan predicts"
    kinds = [
        "state" if isinstance(one, StateGeometry) else "sliding" if one.window else "full"
        for one in loaded.geometry.layers
    ]
    return " and ".join(kind for kind in ("full", "sliding", "state") if kind in kinds)


def measure(model_type: str) -> Family:
    """One family's row."""

    def stop(*_: object) -> None:
        raise TooLong

    name = FAMILIES[model_type]
    name = name if isinstance(name, str) else name[0]
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        try:
            model = tiny_model(model_type)
        except Exception as error:  # noqa: BLE001
            return Family(model_type, name, "not built", "", "", _first_line(error))
        name = type(model).__name__
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / model_type
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(model_folder()).save_pretrained(folder)
            try:
                return Family(model_type, name, "supported", *planned(folder), not attends_back(model_type))
            except Refused as refused:
                return Family(model_type, name, "refused", "", "", " ".join(str(refused).split()))
    except TooLong:
        return Family(model_type, name, "not built", "", "", f"more than {SECONDS} s")
    finally:
        signal.alarm(0)


def attends_back(model_type: str) -> bool:
    """Whether the family's models are causal whatever their config says of ``is_decoder``."""
    try:
        geometry_of(tiny_model(model_type, is_decoder=False))
    except UnsupportedModel as refused:
        return "is not causal" not in refused.message
    return True


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*", help="these alone")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    rows = []
    for model_type in options.families or sorted(FAMILIES):
        started = time.monotonic()
        try:
            row = measure(model_type)
        except Exception as error:  # noqa: BLE001
            row = Family(model_type, "", "FAILED", "", "", _first_line(error))
        rows.append(row)
        taken = f"{time.monotonic() - started:.1f} s"
        print(f"{model_type:28}{row.outcome:11}{taken:8}{row.layers} {row.recipe} {row.reason}", flush=True)
    counts = Counter(row.outcome for row in rows)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + f" of {len(rows)} families")
    if options.out:
        content = {"transformers": hf.__version__, "families": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(row.outcome == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
