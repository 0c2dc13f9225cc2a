"""What processes of tests import or compute once, imported by servers before they fork: no operation of torch, no thread.

A server imports it as a part of the package, so that it is found without the search path of the tests.
"""

from importlib import import_module

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

NAMES = (
    "msgspec",
    "omegaconf",
    "pytest",
    "rich.console",
    "zmq",
    "torch.distributed.fsdp",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "accelerate",
    "peft",
    "drivetrain.engine.bridge.llama",
    "drivetrain.engine.bridge.qwen3",
    "drivetrain.engine.conformance.checks",
    "drivetrain.engine.export",
    "drivetrain.engine.fsdp.engine",
    "drivetrain.engine.mcore.engine",
    "drivetrain.losses.preference",
    "drivetrain.losses.sft",
    "drivetrain.trainers.offline.run",
    "drivetrain.trainers.rl.trainer",
    "drivetrain.trainers.tasks.addition",
    "drivetrain.workers.groups.process",
    "drivetrain.workers.process.data_handlers",
    "drivetrain.workers.process.param_sync",
    "drivetrain.workers.process.program",
    "drivetrain.workers.process.worker",
    "drivetrain.workers.protocol.transports.zeromq",
    "drivetrain.workers.roles.actor",
    "drivetrain.workers.roles.critic",
    "drivetrain.workers.roles.generator",
    "drivetrain.workers.roles.reference",
)

for name in NAMES:
    import_module(name)
# A thousand regular expressions, which a process compiles when it builds its first model.
get_checkpoint_conversion_mapping("llama")
