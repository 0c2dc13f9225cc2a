"""Settings that cannot be meant: one line that names the setting, its value and what is possible, before anything is built."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.engine.config import MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.errors import DrivetrainError, ModelError
from drivetrain.engine.hf.config import read_config
from drivetrain.engine.hf.model import empty_lm
from drivetrain.engine.registry import engine_class
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.config.rl import GRPOConfig, OnlineDPOConfig, PPOConfig, RLConfig
from drivetrain.trainers.config.runs import DPOConfig, RMConfig, SFTConfig
from drivetrain.trainers.config.trainer import TrainerConfig
from drivetrain.trainers.offline.trainer import DPOTrainer, RewardTrainer, SFTTrainer
from drivetrain.trainers.rl.prompts import load_data
from drivetrain.trainers.rl.trainer import GRPOTrainer, OnlineDPOTrainer, PPOTrainer
from drivetrain.trainers.tasks.addition import write_model
from drivetrain.trainers.validate import unused_settings

TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "rm": (RMConfig, RewardTrainer),
    "grpo": (GRPOConfig, GRPOTrainer),
    "ppo": (PPOConfig, PPOTrainer),
    "online_dpo": (OnlineDPOConfig, OnlineDPOTrainer),
}
REFUSED = r"""
sft optim.lr=nan  =>  optim.lr=nan; it must be at least 0
sft optim.lr=inf  =>  optim.lr=inf; it must be finite
sft optim.lr=-1  =>  optim.lr=-1.0; it must be at least 0
sft optim.lr=abc  =>  optim.lr=abc; it must be a number
sft optim.lr=  =>  optim.lr has no value; it must be a number
sft optim.betas=[0.9]  =>  optim.betas=[0.9]; it must be a list of 2 values
sft optim.betas=[0.9,1.0]  =>  optim.betas=[0.9, 1.0]; both must be below 1, as a moment never changes at 1
sft optim.betas=[1.5,0.9]  =>  optim.betas=1.5; it must be from 0 to 1
sft optim.weight_decay=-1  =>  optim.weight_decay=-1.0; it must be at least 0
sft optim.weight_decay=nan  =>  optim.weight_decay=nan; it must be at least 0
sft optim.eps=0  =>  optim.eps=0.0; it must be more than 0, or a parameter without a gradient becomes NaN
sft optim.clip_grad_norm=0  =>  optim.clip_grad_norm=0.0; use a positive norm, or null for no clipping
sft optim.clip_grad_norm=-1  =>  optim.clip_grad_norm=-1.0; use a positive norm, or null for no clipping
sft optim.clip_grad_norm=nan  =>  optim.clip_grad_norm=nan; use a positive norm, or null for no clipping
sft optim.warmup_ratio=2  =>  optim.warmup_ratio=2.0; it must be from 0 to 1
sft optim.warmup_ratio=-0.1  =>  optim.warmup_ratio=-0.1; it must be from 0 to 1
sft optim.warmup_steps=-1  =>  optim.warmup_steps=-1; it must be at least 0
sft optim.min_lr_ratio=2  =>  optim.min_lr_ratio=2.0; it must be from 0 to 1
sft optim.lr=1e30  =>  optim.lr=1e+30 with optim.name=adamw, which moves every parameter by about that much in a step; it must be at most 10
sft optim.lr=1e30 optim.name=sgd  =>  optim.lr=1e+30 with optim.name=sgd; it must be at most 10000
sft optim.eps=1e8  =>  optim.eps=100000000.0; it must be at most 10000
sft optim.weight_decay=1e30  =>  optim.weight_decay=1e+30 with optim.lr=1e-05: a step multiplies matrices by 1 - lr * weight_decay
sft optim.clip_grad_norm=1e-30  =>  optim.clip_grad_norm=1e-30 with optim.eps=1e-08, which makes such gradients negligible
sft optim.schedule=polynomial  =>  optim.schedule=polynomial; it must be one of constant, linear, cosine, invers
sft optim.name=adam  =>  optim.name=adam; it must be one of adamw, sgd
sft data.batch_size=0  =>  data.batch_size=0; it must be at least 1
sft data.batch_size=1.5  =>  data.batch_size=1.5; it must be a whole number
sft data.batch_size=true  =>  data.batch_size=True; it must be a whole number
sft data.batch_size=1e3  =>  data.batch_size=1000.0; it must be a whole number
sft data.max_length=-5  =>  data.max_length=-5; it must be at least 1
sft data.max_length=99999  =>  data.max_length=99999 is more than engine.micro_batch.max_tokens=8192: a sample of that length would
sft data.train=[]  =>  data.train is not set; give files, folders or Hub names, for example data.train=[train.jsonl]
sft data.train=null  =>  data.train has no value; it must be a list
sft data.weights=[1,2]  =>  data.weights has 2 numbers, data.train has 1 sources; give one weight per source
sft data.weights=[0]  =>  data.weights=[0.0]; weights must be more than 0: to leave a source out, remove it from data.train
sft data.weights=[nan]  =>  data.weights=[nan]; weights must be more than 0: to leave a source out, remove it from data.train
sft data.weights=[-1]  =>  data.weights=[-1.0]; weights must be more than 0: to leave a source out, remove it from data.train
sft data.seed=-1  =>  data.seed=-1; it must be at least 0
sft data.train_on=prompt  =>  data.train_on=prompt; it must be one of completions, last_completion, all
sft data.format=chatml  =>  data.format=chatml; it must be one of auto, messages, prompt_completion, shar
sft data.turns=none  =>  data.turns=none; it must be one of auto, single, per_turn
sft data.too_long=truncate  =>  data.too_long=truncate; it must be one of error, skip, truncate_left, truncat
sft data.columns=prompt  =>  data.columns=prompt; it must be a mapping, as in data.columns={name: value}
sft data.columns=[prompt]  =>  data.columns=['prompt']; it must be a mapping, as in data.columns={name: value}
sft data.workers=-1  =>  data.workers=-1; it must be at least 0
sft data.workers=1000000  =>  data.workers=1000000; it must be at most 1024
sft data.columns={prompt: a, completion: a}  =>  data.columns={'prompt': 'a', 'completion': 'a'}: prompt and completion would be one column, 'a'
sft data.streaming=yes  =>  data.streaming=true without trainer.max_steps: the number of samples in an epoch is not known before
sft data.streaming=maybe  =>  data.streaming: Value 'maybe' is not a valid bool (type str)
sft trainer.epochs=0  =>  trainer.epochs=0; it must be at least 1
sft trainer.epochs=0.5  =>  trainer.epochs=0.5; it must be a whole number
sft trainer.max_steps=0  =>  trainer.max_steps=0; it must be at least 1
sft trainer.max_steps=-1  =>  trainer.max_steps=-1; it must be at least 1
sft trainer.save_every=0  =>  trainer.save_every=0; it must be at least 1
sft trainer.eval_every=10  =>  trainer.eval_every=10 needs data.eval, which is not set
sft trainer.patience=3  =>  trainer.patience=3 counts evaluations, but the only evaluation is at the end; set trainer.eval_every
sft trainer.best_metric=f1  =>  trainer.best_metric=f1 needs data.eval, which is not set
sft trainer.best_metric=accuracy  =>  trainer.best_metric=accuracy needs data.eval, which is not set
sft trainer.eval_completions=-1  =>  trainer.eval_completions=-1; it must be at least 0
sft trainer.eval_completions=3  =>  trainer.eval_completions=3 needs data.eval, which is not set
sft trainer.metrics=[exact_match]  =>  trainer.metrics=['exact_match'] scores generated completions, but trainer.eval_completions=0; set it to their nu
sft trainer.metrics=exact  =>  trainer.metrics=['exact'] scores generated completions, but trainer.eval_completions=0; set it to their number
sft trainer.loggers=[tensorbord]  =>  trainer.loggers names 'tensorbord'; the loggers are console, jsonl, tensorboard, wandb
sft trainer.loggers=none  =>  trainer.loggers names 'none'; the loggers are console, jsonl, tensorboard, wandb
sft trainer.keep_last=0  =>  trainer.keep_last=0; it must be at least 1
sft trainer.resume=latest  =>  trainer.resume=latest is not a folder; give auto, none or a checkpoint folder
sft trainer.resume=/nope  =>  trainer.resume=/nope is not a folder; give auto, none or a checkpoint folder
sft trainer.timeout_minutes=0  =>  trainer.timeout_minutes=0.0; it must be more than 0
sft trainer.timeout_minutes=nan  =>  trainer.timeout_minutes=nan; it must be more than 0
sft trainer.timeout_minutes=1e30  =>  trainer.timeout_minutes=1e+30; it must be at most 1e+06
sft trainer.timeout_minutes=1e-30  =>  trainer.timeout_minutes=1e-30; it must be at least 0.01
sft trainer.peak_tflops=1e30  =>  trainer.peak_tflops=1e+30; it must be at most 1e+06
sft trainer.peak_tflops=0  =>  trainer.peak_tflops=0.0; it must be more than 0
sft trainer.checkpoint_dir=s3x://a/b  =>  trainer.checkpoint_dir: s3x://a/b cannot be opened: Protocol not known: s3x
sft trainer.log_every=0  =>  trainer.log_every=0; it must be at least 1
sft model.path=  =>  model.path has no value; it must be a string
sft model.head=lm_head  =>  model.head=lm_head; it must be one of actions, lm, value
sft model.head=value  =>  model.head=value: SFT trains a language-model head; set model.head=lm
sft model.init=scratch  =>  model.init=scratch; it must be one of weights, random
sft model.lora.rank=-1  =>  model.lora.rank=-1; it must be a positive rank, or 0 for no adapters
sft model.lora.rank=1.5  =>  model.lora.rank=1.5; it must be a whole number
sft model.lora.rank=1000000000  =>  model.lora.rank=1000000000 is more than hidden_size=128 of MODEL, so adapters would have more
sft model.lora.rank=8 model.lora.alpha=1e30  =>  model.lora.alpha=1e+30 with model.lora.rank=8 multiplies the output of the adapters by 1.25e+29
sft model.lora.alpha=32  =>  model.lora.alpha=32.0 with model.lora.rank=0, where the whole model is trained; set the rank, or leave model.lora.alpha at 16.0
sft model.lora.rslora=true  =>  model.lora.rslora=True with model.lora.rank=0, where the whole model is trained; set
sft model.lora.dropout=0.1  =>  model.lora.dropout=0.1 with model.lora.rank=0, where the whole model is trained; set
sft model.lora.targets=[q_proj]  =>  model.lora.targets=['q_proj'] with model.lora.rank=0, where the whole model is trained; set
sft model.lora.rank=8 model.lora.alpha=-1  =>  model.lora.alpha=-1.0; it must be a finite number above 0
sft model.lora.rank=8 model.lora.alpha=nan  =>  model.lora.alpha=nan; it must be a finite number above 0
sft model.lora.rank=8 model.lora.dropout=1  =>  model.lora.dropout=1.0; it must be a probability below 1
sft model.lora.rank=8 model.lora.targets=[]  =>  model.lora.targets=[] with model.lora.rank=8; name layers, or all-linear
sft model.lora.modules_to_save=[lm_head]  =>  model.lora.modules_to_save=['lm_head'] with model.lora.rank=0, where the whole model is trained; set
sft model.quantization=4bit  =>  model.quantization=4bit; it must be one of none, int8, nf4
sft model.quantization=nf4  =>  model.quantization=nf4: QLoRA is not supported by backend 'fsdp', which supports none; use adapters 
sft model.overrides=5  =>  model.overrides=5; it must be a mapping, as in model.overrides={name: value}
sft model.overrides.max_positions=9  =>  model.overrides.max_positions=9: the config of MODEL has no such setting; did you mean max_position_embeddings?
sft model.overrides.rms_norm_eps=abc  =>  model.overrides.rms_norm_eps='abc': the config of MODEL has 1e-06 there; give a number
sft model.overrides.model_type=llama  =>  model.overrides.model_type=llama: another family has other weights
sft model.overrides.attention_dropout=0.1  =>  attention_dropout=0.1 in the config of MODEL: dropout on attention weights is not supported on packed sequences; set model.overrides.attention_dropout=0
sft model.overrides.nope=5  =>  model.overrides.nope=5: the config of MODEL has no such setting
sft model.overrides.num_hidden_layers=0  =>  model.overrides.num_hidden_layers=0; it must be at least 1
sft model.overrides.num_hidden_layers=1  =>  model.overrides.num_hidden_layers=1, but layer_types of the config of MODEL has 2 entries, one per layer; give model.overrides.layer_types too, a list of 1 (full_attention)
sft model.overrides.num_hidden_layers=3  =>  model.overrides.num_hidden_layers=3, but layer_types of the config of MODEL has 2 entries
sft model.overrides.layer_types=[full_attention]  =>  model.overrides.layer_types=['full_attention'] has 1 entries, but the config of MODEL has 2 layers
sft model.overrides.layer_types=[full_attention,none]  =>  model.overrides.layer_types=['full_attention', 'none']: the config of MODEL rejects that: The `layer_types` entries must be in
sft model.overrides.rope_parameters=5  =>  model.overrides.rope_parameters=5: the config of MODEL rejects it: Field 'rope_parameters' with value 5
sft engine.backend=deepspeed  =>  engine.backend='deepspeed' is unknown; available: fsdp, mcore; install the package that provides a custom backend; sharding is set by engine.parallel.*
sft engine.parallel.dp_shard=0  =>  engine.parallel.dp_shard=0; it must be at least 1
sft engine.parallel.cp=0  =>  engine.parallel.cp=0; it must be at least 1
sft engine.parallel.cp=3  =>  engine.parallel.cp=3 does not divide the 4 attention heads of qwen3 (num_attention_heads=4); use one
sft engine.parallel.tp=2  =>  engine.parallel.tp=2: backend 'fsdp' supports the axes cp, dp_replicate, dp_shard, ep; use one of th
sft engine.parallel.pp=2  =>  engine.parallel.pp=2: backend 'fsdp' supports the axes cp, dp_replicate, dp_shard, ep; use one of th
sft engine.micro_batch.max_tokens=0  =>  engine.micro_batch.max_tokens=0; it must be at least 1
sft engine.micro_batch.max_tokens=-1  =>  engine.micro_batch.max_tokens=-1; it must be at least 1
sft engine.micro_batch.infer_max_tokens=0  =>  engine.micro_batch.infer_max_tokens=0; it must be at least 1
sft engine.precision.params=fp16  =>  engine.precision.params=fp16; it must be one of float32, bfloat16, float16, f
sft engine.precision.compute=float8  =>  engine.precision.compute=float8; it must be one of auto, float32, bfloat16, f
sft engine.recompute=true  =>  engine.recompute=True; it must be one of auto, none, full, selective
sft engine.compile=maybe  =>  engine.compile: Value 'maybe' of type 'str'; use auto, true or false
sft engine.offload.params=cpu  =>  engine.offload.params=cpu; it must be one of none, host, disk
sft engine.non_finite=ignore  =>  engine.non_finite=ignore; it must be one of raise, skip
sft engine.options.nope=1  =>  unknown setting 'engine.options.nope'; this backend's engine.options are allow_unverified_family, re
sft engine.options.fused_adam=true  =>  unknown setting 'engine.options.fused_adam'; this backend's engine.options are allow_unverified_fami
sft engine.seed=-1  =>  engine.seed=-1; it must be at least 0
sft engine.seed=99999999999999999999  =>  engine.seed=99999999999999999999; it must be at most 9.22337e+18
sft engine.share_prefixes=maybe  =>  engine.share_prefixes=maybe; it must be one of auto, on, off
sft lr=1e-4  =>  unknown setting 'lr'; did you mean 'optim.lr'? (--help lists all settings)
sft learning_rate=1e-4  =>  unknown setting 'learning_rate'; did you mean 'optim.lr'? (--help lists all settings)
sft per_device_train_batch_size=4  =>  unknown setting 'per_device_train_batch_size'; did you mean 'data.batch_size'? (--help lists all set
sft bf16=true  =>  unknown setting 'bf16': the dtype is engine.precision.compute, by default bfloat16 on GPUs; 
sft deepspeed=ds.json  =>  unknown setting 'deepspeed': the model is sharded over all processes of --nproc; other layouts are e
sft fsdp=full_shard  =>  unknown setting 'fsdp': the model is sharded over all processes of --nproc; other layouts are engine
sft report_to=wandb  =>  unknown setting 'report_to'; did you mean 'trainer.loggers'? (--help lists all settings)
sft max_length=5  =>  unknown setting 'max_length'; did you mean 'data.max_length'? (--help lists all settings)
sft trainer.lr=5  =>  unknown setting 'trainer.lr'; did you mean 'optim.lr'? (--help lists all settings)
sft optim=adamw  =>  optim=adamw: optim is a section with settings, such as optim.name; set one of them
sft recipe=llama  =>  recipe=llama does not exist; the built-in recipes are sft, sft_demo, sft_lora, sft_vision_demo; or give the path of a
sft recipe=grpo  =>  recipe=grpo belongs to another trainer; this one has sft, sft_demo, sft_lora, sft_vision_demo
sft recipe=/nope.yaml  =>  recipe=/nope.yaml does not exist; the built-in recipes are sft, sft_demo, sft_lora, sft_vision_demo; or give the path
dpo dpo.beta=0  =>  dpo.beta=0.0; it must be more than 0
dpo dpo.beta=nan  =>  dpo.beta=nan; it must be more than 0
dpo dpo.beta=-0.1  =>  dpo.beta=-0.1; it must be more than 0
dpo dpo.beta=1e30  =>  dpo.beta=1e+30; it must be at most 1000
dpo dpo.beta=1e-30  =>  dpo.beta=1e-30; it must be at least 1e-06
dpo dpo.loss=dpo  =>  dpo.loss=dpo; it must be one of aot, apo_down, apo_zero, bco_pair
dpo dpo.label_smoothing=0.5  =>  dpo.label_smoothing=0.5; it is a fraction of flipped labels, at least 0 and below 0.5
dpo dpo.loss=simpo dpo.gamma=-1  =>  dpo.gamma=-1.0; it is a margin and must be 0 or more
dpo dpo.loss=simpo reference.path=/x  =>  reference.* is set with dpo.loss=simpo, which has no reference; unset it
sft model.path=a--b/c  =>  model.path=a--b/c is not a folder; use a folder with config.json, or a Hugging Face name (org/name)
sft model.path=a/b.git  =>  model.path=a/b.git is not a folder; use a folder with config.json, or a Hugging Face name (org/name)
dpo reference.path=/nope  =>  the reference cannot be built (reference.path=/nope): model.path=/nope is not a folder; use a folder
dpo reference.mode=base  =>  reference.mode=base needs adapters to disable (model.lora.rank); use model or cached
dpo reference.mode=none  =>  reference.mode=none; it must be one of auto, model, base, cached
dpo reference.backend=nope  =>  the reference cannot be built (it is model.path; reference.path is unset): engine.backend='nope' is 
dpo dpo.loss=kto data.batch_size=1  =>  data.batch_size=1: kto compares each completion with another one in the batch; use at least 2
dpo dpo.loss_weights={sigmoid: 0}  =>  dpo.loss_weights.sigmoid=0.0; it must be a number above 0
dpo dpo.loss_weights={foo: 1}  =>  dpo.loss_weights.foo=1.0; choose one of aot, apo_down, apo_zero, bco_pair
dpo dpo.divergence=kl  =>  dpo.divergence=kl; it must be one of reverse_kl, forward_kl, js_divergence, a
dpo data.train_on=all  =>  data.train_on=all: DPO compares entire completions; unset it
dpo data.streaming=true reference.mode=cached trainer.max_steps=5  =>  reference.mode=cached with data.streaming=true, which stores nothing; use reference.mode=model, or b
rm model.head=lm  =>  model.head=lm: reward modeling trains a value head, which gives one number per text; set model.head=
rm trainer.eval_completions=2 data.eval=[DATA]  =>  trainer.eval_completions=2: reward modeling trains a model that cannot generate text; set it to 0
rm rm.centering=-1  =>  rm.centering=-1.0; it must be 0 or more
rm rm.centering=1e30  =>  rm.centering=1e+30; it must be at most 1e+06
rm rm.centering=nan  =>  rm.centering=nan; it must be 0 or more
grpo rewards.use=[]  =>  rewards.use is not set, so no reward is configured; give names, such as rewards.use=[ans
grpo rewards.use=[answer] rl.group_size=1  =>  rl.group_size=1 with rl.algorithm=grpo, which compares the completions of one prompt; use at least 2, or
grpo rewards.use=[answer] rl.group_size=0  =>  rl.group_size=0; it must be at least 1
grpo rewards.use=[answer] rl.group_size=1000000000  =>  rl.group_size=1000000000; it must be at most 65536
grpo rewards.use=[answer] rollout.temperature=1e30  =>  rollout.temperature=1e+30; it must be at most 1000
grpo rewards.use=[answer] rollout.temperature=1e-30  =>  rollout.temperature=1e-30; it must be at least 0.001
grpo rewards.use=[answer] rl.loss.kl_coef=1e30  =>  rl.loss.kl_coef=1e+30; it must be at most 1e+06
grpo rewards.use=[answer] group.nproc=1000000  =>  group.nproc=1000000; it must be at most 4096
grpo rewards.use=[answer] group.pools={rollout: 9999}  =>  group.pools.rollout=9999; it must be at most 4096
grpo rewards.use=[answer] model.lora.alpha=32  =>  the role actor (actor.model, actor.engine, or what they inherit): model.lora.alpha=32.0
grpo rewards.use=[answer] rl.algorithm=grop  =>  rl.algorithm=grop; it must be one of cispo, clip_cov, dapo
grpo rewards.use=[answer] rl.mini_batch_size=0  =>  rl.mini_batch_size=0; it must be at least 1
grpo rewards.use=[answer] rl.epochs=0  =>  rl.epochs=0; it must be at least 1
grpo rewards.use=[answer] rollout.max_tokens=0  =>  rollout.max_tokens=0; it must be at least 1
grpo rewards.use=[answer] rollout.temperature=0  =>  rollout.temperature=0.0; it must be a finite number above 0, so that completions differ from each other
grpo rewards.use=[answer] rollout.temperature=nan  =>  rollout.temperature=nan; it must be a finite number above 0, so that completions differ from each other
grpo rewards.use=[answer] rollout.temperature=-1  =>  rollout.temperature=-1.0; it must be a finite number above 0, so that completions differ from each othe
grpo rewards.use=[answer] rollout.top_p=0  =>  rollout.top_p=0.0; it must be above 0 and at most 1
grpo rewards.use=[answer] rollout.top_p=1.5  =>  rollout.top_p=1.5; it must be above 0 and at most 1
grpo rewards.use=[answer] rollout.generator=sglang  =>  generator='sglang' is unknown; available: continuous, exact, static, tensor_parallel, vllm, vllm_server; na
grpo rewards.use=[answer] rl.loss.clip_low=-1  =>  rl.loss.clip_low=-1.0; it must be 0 or more (rl.algorithm=grpo)
grpo rewards.use=[answer] rl.loss.clip_low=nan  =>  rl.loss.clip_low=nan; it must be 0 or more (rl.algorithm=grpo)
grpo rewards.use=[answer] rl.loss.kl_coef=-1  =>  rl.loss.kl_coef=-1.0; it must be 0 or more (rl.algorithm=grpo)
grpo rewards.use=[answer] rl.loss.kl_coef=nan  =>  rl.loss.kl_coef=nan; it must be 0 or more (rl.algorithm=grpo)
grpo rewards.use=[answer] rl.loss.aggregation=mean  =>  rl.loss.aggregation=mean; it must be one of token-mean, seq-mean-token-sum, seq
grpo rewards.use=[answer] rl.importance=maybe  =>  rl.importance=maybe; it must be one of auto, none, truncate, mask
grpo rewards.use=[answer] rl.kl_target=0  =>  rl.kl_target=0.0; it must be more than 0, or null
grpo rewards.use=[answer] rl.dynamic_sampling=true rl.max_resamples=0  =>  rl.max_resamples=0; it must be at least 1
grpo rewards.use=[answer] group.nproc=0  =>  group.nproc=0; it must be at least 1
grpo rewards.use=[answer] group.kind=slurm  =>  group.kind=slurm; it must be one of process, ray, local
grpo rewards.use=[answer] group.pools={actor: 1}  =>  group.pools.actor=1: roles that can have dedicated processes are critic, reference, reward, rollo
grpo rewards.use=[answer] group.pools={rollot: 1}  =>  group.pools.rollot=1: roles that can have dedicated processes are critic, reference, reward, roll
grpo rewards.use=[answer] data.too_long=split  =>  data.too_long=split: a prompt cannot be split; use skip, truncate_left or truncate_right
grpo rewards.use=[answer] data.streaming=true  =>  unknown setting 'data.streaming'; did you mean 'data.train'? (--help lists all settings)
grpo rewards.use=[answer] trainer.metrics=[exact_match]  =>  unknown setting 'trainer.metrics'; did you mean 'trainer.best_metric'? (--help lists all settings)
grpo rewards.use=[answer] trainer.best_metric=loss data.eval=[DATA]  =>  trainer.best_metric=loss; the metrics of an evaluation are reward, accuracy
ppo rewards.use=[answer] rl.advantage.gamma=2  =>  rl.advantage.gamma=2.0; it must be between 0 and 1
ppo rewards.use=[answer] rl.advantage.lam=-1  =>  rl.advantage.lam=-1.0; it must be between 0 and 1
ppo rewards.use=[answer] rl.critic_clip=-1  =>  rl.critic_clip=-1.0; it must be at least 0
ppo rewards.use=[answer] rl.critic_warmup=-1  =>  rl.critic_warmup=-1; it must be at least 0
ppo rewards.use=[answer] rl.algorithm=grpo  =>  rl.group_size=1 with rl.algorithm=grpo, which compares the completions of one prompt; use at least 2, or
online_dpo rewards.use=[answer] rl.group_size=1  =>  rl.group_size=1 with rl.algorithm=online_dpo, which compares the completions of one prompt; use at least
online_dpo rewards.use=[answer] dpo.beta=0  =>  dpo.beta=0.0; it must be more than 0
"""


def cases() -> Iterator[tuple[str, list[str], str]]:
    """A trainer, its settings, and the beginning of the message."""
    for line in REFUSED.strip().splitlines():
        command, _, message = line.partition("  =>  ")
        trainer, _, words = command.partition(" ")
        yield trainer, re.split(r" (?=[a-z_.]+=)", words), message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 0)
    return folder


def check(trainer: str, words: list[str], model: Path) -> None:
    """What a command checks before it reads data or weights."""
    given = [word.replace("DATA", str(model / "config.json")) for word in words]
    base = [f"model.path={model}", f"data.train=[{model / 'config.json'}]"]
    config_class, trainer_class = TRAINERS[trainer]
    config = config_class.parse(*base, *given)
    trainer_class(config).check()
    if not isinstance(config, RLConfig):
        engine_class(config.engine.backend)(model=config.model, engine=config.engine, optim=config.optim).check()


@pytest.mark.parametrize(("trainer", "words", "message"), cases(), ids=[f"{t} {' '.join(w)}" for t, w, _ in cases()])
def test_it_is_refused_in_one_line(trainer: str, words: list[str], message: str, model: Path) -> None:
    with pytest.raises(DrivetrainError, match=re.escape(message.replace("MODEL", str(model)))) as found:
        check(trainer, words, model)
    assert "\n" not in str(found.value)
    # It names one of the settings that were given, or the one that is meant.
    names = {part for word in words for part in re.split(r"[.{]", word.partition("=")[0])}
    assert any(name in str(found.value) for name in names)


@pytest.mark.parametrize(
    ("words", "message"), [("hidden_act=nope", "KeyError: 'nope'"), ("rope_parameters.rope_theta=a", "TypeError: ")]
)
def test_a_model_that_cannot_be_built_is_refused_in_one_line(words: str, message: str, model: Path) -> None:
    config = SFTConfig.parse(f"model.path={model}", f"model.overrides.{words}").model
    with pytest.raises(ModelError, match=rf"model\.overrides\..*: no model can be built .*: {message}") as found:
        empty_lm(read_config(config), config, torch.float32)
    assert "\n" not in str(found.value)
    # What no setting has caused keeps its traceback.
    family: Any = type(read_config(config))
    with pytest.raises(KeyError):
        empty_lm(family(hidden_act="nope"), ModelConfig(path=str(model)), torch.float32)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_control_of_the_test_above(trainer: str, model: Path) -> None:
    check(trainer, ["rewards.use=[answer]"] if issubclass(TRAINERS[trainer][0], RLConfig) else [], model)


def test_what_of_the_optimizer_does_not_take_effect_is_told() -> None:
    assert unused_settings(OptimConfig(warmup_steps=5, schedule="cosine", min_lr_ratio=0.1), 5) == []
    both = OptimConfig(lr=1.0, warmup_steps=10, warmup_ratio=0.1)
    assert unused_settings(both, 4) == [
        "optim.warmup_steps=10 is used; optim.warmup_ratio=0.1 would be used only without it",
        "optim.warmup_steps=10 is more than the 4 steps of the run, whose learning rate rises only to 0.4, not to optim.lr=1.0",
    ]
    assert unused_settings(OptimConfig(name="sgd", eps=1e-6, decay_ratio=0.1, min_lr_ratio=0.1, lr=0), 4, "critic.optim") == [
        "critic.optim.min_lr_ratio=0.1 is not used with critic.optim.schedule=constant",
        "critic.optim.decay_ratio=0.1 is not used with critic.optim.schedule=constant",
        "critic.optim.eps=1e-06 is not used with critic.optim.name=sgd",
        "critic.optim.lr=0.0: no parameter will change",
    ]


def test_prompts_leave_room_in_the_models_positions(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before a model is built: a generator would refuse them in the middle of a step."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1" * length, "answer": "2"}) + "\n" for length in (63, 64)))
    settings = [f"model.path={model}", f"data.train=[{file}]", "rewards.use=[answer]"]
    with pytest.raises(
        DrivetrainError, match=rf"prompts.jsonl:2 has a prompt of 64 tokens, more than the 64 positions of {model} "
    ):
        load_data(GRPOConfig.parse(*settings))
    # Two optimizer steps in each of the two steps of the run.
    more = ["optim.warmup_steps=5", "trainer.max_steps=2", "data.batch_size=1", "rl.group_size=4", "rl.mini_batch_size=2"]
    planned = GRPOConfig.parse(*settings, "data.too_long=skip", "data.columns={answer: answer, copy: answer}", *more)
    prompts, _, _ = GRPOTrainer(planned)._plan()
    assert prompts.train.longest == 63
    assert "optim.warmup_steps=5 is more than the 4 steps of the run" in caplog.text
    assert "data.columns: answer and copy are the same column, 'answer'" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimConfig(lr="1e-4"), "optim.lr='1e-4' is a str; it must be a number"),  # type: ignore[arg-type]
        (lambda: OptimConfig(lr=-1.0), "optim.lr=-1.0"),
        (lambda: DataConfig(batch_size=0), "data.batch_size=0; it must be at least 1"),
        (lambda: DataConfig(train=5), "data.train=5 is an int; it must be a list of texts"),  # type: ignore[arg-type]
        (lambda: MicroBatchConfig(max_tokens=0), "engine.micro_batch.max_tokens=0; it must be at least 1"),
        (lambda: ParallelConfig(cp=0), "engine.parallel.cp=0; it must be at least 1"),
        (lambda: TrainerConfig(epochs=0), "trainer.epochs=0; it must be at least 1"),
        (lambda: TrainerConfig(timeout_minutes=-1), "trainer.timeout_minutes=-1; it must be more than 0"),
        (
            lambda: SFTConfig(data={"train": "a.jsonl"}),  # type: ignore[arg-type]
            "SFTConfig.data={'train': 'a.jsonl'} is a dict; it must be a DataConfig",
        ),
    ],
)
def test_configurations_check_types_and_values_when_they_are_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(DrivetrainError, match=re.escape(message)):
        make()
