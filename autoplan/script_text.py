"""The fixed parts of a written training script."""

from __future__ import annotations

import json
from pathlib import Path

from autoplan.errors import EmitError
from autoplan.models import PRESETS, LoadedModel

__all__ = ["HEAD", "TAIL", "model_text"]

HEAD = '''"""Train a model as a plan says. Written by autoplan, which it does not need.

    torchrun --nproc-per-node {world} THIS_SCRIPT [--steps 10]

{report}
"""

from __future__ import annotations
'''

TAIL = """
# What runs.

{plan}

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

device = ensure_process_group(None, timeout_s=1800.0)
MESH = make_mesh(PLAN, device)
TP_RANK = MESH.get_local_rank("tp")
TP_GROUP = MESH.get_group("tp")

{objects}

{stages}

torch.manual_seed(0)
model, batch = load_model()
if {is_mixed}:
    store_in_float32(model)
module = build_stage(PLAN, ({names},), model, MESH, device)
del model
seed_ranks(PLAN.mesh)
optimizer = make_optimizer({optimizer!r}, module.parameters())
for step in range(options.steps):
    # Replace this by your data: every rank takes its rows of the global batch of {rows}.
    share = module.shard_batch(global_batch(batch, {rows}, step))
    loss = float(module.train_step(share))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if dist.get_rank() == 0:
        print(f"step {{step:4d}}  loss {{loss:.9f}}", flush=True)
exit_worker()
"""

_FROM_FILE = '''
def load_model():
    """Return the model and an example batch; put your weights in here."""
    import importlib.util
    import sys
    from pathlib import Path

    path = Path({path!r})
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location("user_model", path)
    user_model = importlib.util.module_from_spec(spec)
    sys.modules["user_model"] = user_model
    spec.loader.exec_module(user_model)
    model, batch = user_model.{function}()[:2]
    return model, batch
'''

_FROM_CONFIG = '''
def load_model():
    """Return the model and an example batch; put your weights in here."""
    import json

    import transformers

    values = json.loads({config!r})
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (2, {seq}), generator=generator)
    return model, {{"input_ids": ids, "labels": ids.clone()}}
'''


def model_text(spec: str, loaded: LoadedModel) -> str:
    """Return the function of a script that makes the model.

    Raises:
        EmitError: the spec is none that a script can follow.
    """
    path, _, function = spec.rpartition(":")
    if path.endswith(".py"):
        return _FROM_FILE.format(path=str(Path(path).resolve()), function=function)
    if spec in PRESETS or spec.endswith(".json"):
        config = loaded.model.config
        tokens = loaded.batch["input_ids"].shape[1]
        values = dict(config.to_diff_dict())  # type: ignore[union-attr, operator]
        values.pop("transformers_version", None)
        values["model_type"] = config.model_type  # type: ignore[union-attr]
        values["use_cache"] = False
        text = json.dumps(values)
        return _FROM_CONFIG.format(config=text, seq=tokens)
    raise EmitError(f"{spec!r} is no model that a script can load: write file.py:function")
