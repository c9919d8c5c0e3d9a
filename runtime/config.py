"""What a run is: the configuration tree; where it runs is in `runtime.site`.

Frozen and keyword-only; unknown keys are errors. It is never passed whole below `runtime.main`: a function takes the
part it uses. Files are read, merged and checked by `runtime.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

Positive = Annotated[int, Meta(ge=1, le=10**12)]
NonNegative = Annotated[int, Meta(ge=0, le=10**12)]
"""Bounded, so that sums of them fit into 64 bits."""
Count = Annotated[int, Meta(ge=1, le=10**6)]
"""Of what is held in lists, or started."""
PositiveFloat = Annotated[float, Meta(gt=0.0, le=1e9)]
NonNegativeFloat = Annotated[float, Meta(ge=0.0, le=1e9)]
"""Bounded, so that .inf is refused; 1e9 seconds are thirty years."""
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Address = Annotated[str, Meta(pattern=r"^http://([^/?#@:\[\]\s]+|\[[\da-fA-F:.]+\]):\d{1,5}$")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every part of the tree."""


class Model(Section, frozen=True, kw_only=True):
    path: str
    """Hugging Face folder: config.json, safetensors and tokenizer files."""


class Teacher(Model, frozen=True, kw_only=True):
    expert: NonNegative = 0
    """Ranks that share out its experts, with trainer.kind megatron; 0: as many as trainer.parallel.expert says."""


class Models(Section, frozen=True, kw_only=True):
    policy: Model
    """The model that is trained."""
    reference: Model | None = None
    """Never changed; loaded where the algorithm compares the policy with it. Empty: the policy as it was at first."""
    critic: Model | None = None
    """What the critic starts from, where the algorithm trains one. Empty: as the policy does."""
    teacher: Teacher | None = None
    """Never changed; what the policy learns from by distillation. Its tokens are the policy's."""
    teachers: dict[Name, Teacher] = {}
    """Several of them, by names that data sets give; instead of `teacher`."""
    judge: Model | None = None
    """Never changed; what rewards ask, served by engines of its own (`rollout.sets`)."""


class Sampling(Section, frozen=True, kw_only=True):
    temperature: NonNegativeFloat = 1.0
    """0 is greedy. The log-probs that are stored are those of the distribution that was sampled from."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    """-1: all tokens."""
    max_new_tokens: Positive = 256
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves no token: write -1 for all, or at least 1")
        if 0 < self.temperature < 1e-3:
            raise ValueError(
                f"temperature is {self.temperature:g}, by which logits grow beyond float32: write 0 for greedy"
            )


class DataSet(Section, frozen=True, kw_only=True):
    path: str
    """JSON lines: {"messages": [...] or "prompt": "...", "answer": ..., "metadata": {...}}."""
    name: str = ""
    """How metrics and prompt ids call it; empty: the file's name without its suffix."""
    environment: str = "single_turn"
    """A file in runtime/rollout/environments, or a dotted path."""
    environment_options: dict[str, Any] = {}
    reward: str = "exact_match"
    """A file in runtime/rollout/rewards, or a dotted path."""
    reward_options: dict[str, Any] = {}
    teacher: str = ""
    """Which of `models.teachers` answers to its prompts learn from."""
    shuffle: bool = True
    """A new order each epoch, drawn from the run's seed."""

    @property
    def label(self) -> str:
        """`name`, or what stands for it."""
        return self.name or Path(self.path).stem


class Filters(Section, frozen=True, kw_only=True):
    drop_equal_rewards: bool = False
    """Drop a group whose rewards have no spread (DAPO's dynamic sampling, arXiv 2503.14476): its gradient is zero."""


class Engines(Section, frozen=True, kw_only=True):
    """Those of one model."""

    engine: str = "embedded"
    """A file in runtime/rollout/engines."""
    engine_options: dict[str, Any] = {}
    """Checked by the engine's Config."""
    gpus_per_engine: Positive = 1
    """Some of a node's or all of several nodes', if the engine cuts its model so. On a site without GPUs, CPU slots."""
    external: tuple[Address, ...] = ()
    """Servers of this kind that somebody else runs, as in http://10.0.0.7:30000."""
    token_file: str = ""
    """What the external ones want as bearer token, in a file that only you can read; empty: nothing."""


Asked = Literal["judge", "teacher"]
"""Models that rewards may ask."""


class EngineSet(Engines, frozen=True, kw_only=True):
    """Engines of a model that is never changed, for rewards to ask."""

    model: Asked
    """Which of `models`."""
    engines_per_node: Count = 1
    """On each node that has engines; the policy's get what is left of it. With `external` none is started."""


class Rollout(Engines, frozen=True, kw_only=True):
    """Sampling, with the policy's engines; external ones come to those that are started."""

    sets: tuple[EngineSet, ...] = ()
    """Engines of other models, at most one set of each."""
    prefill_per_node: NonNegative = 0
    """Of the policy's engines on a node: so many compute prompts only, and hand them over to the others, which only
    decode. 0: each does both."""
    num_prompts: Count
    """Groups in a batch, that is: prompts per step."""
    num_samples: Count
    """Answers to each prompt: the size of a group."""
    sampling: Sampling = field(default_factory=Sampling)
    filters: Filters = field(default_factory=Filters)
    max_concurrent: Positive = 256
    """Samples an agent runs at the same time."""
    reward_workers: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Processes an agent computes rewards in."""
    reward_timeout_s: PositiveFloat = 30.0
    """A reward that takes longer fails its sample."""
    environment_timeout_s: PositiveFloat = 1800.0
    """An environment that takes longer for one sample fails it. The time stands still while no engine is up."""

    @property
    def engines(self) -> dict[str, Engines]:
        """By model."""
        return {"policy": self, **{one.model: one for one in self.sets}}


class AlgorithmChoice(Section, frozen=True, kw_only=True):
    name: str = "grpo"
    """A file in runtime/trainer/algorithms, or a dotted path."""
    options: dict[str, Any] = {}
    """Checked by the algorithm's Config."""


class Optimizer(Section, frozen=True, kw_only=True):
    """AdamW (arXiv 1711.05101)."""

    learning_rate: NonNegativeFloat = 1e-6
    warmup_updates: NonNegative = 0
    """Linear from 0 over so many updates, constant after."""
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.95
    eps: Annotated[float, Meta(ge=1e-30, le=1e9)] = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: NonNegativeFloat = 1.0
    """Global gradient norm; 0 turns clipping off."""
    offload: bool = False
    """Keep masters and moments in the host's memory and step there: 12 bytes a parameter less on the GPU, slower."""


class Parallel(Section, frozen=True, kw_only=True):
    """How the megatron trainer cuts one model over trainer ranks; what is left of them is data-parallel."""

    tensor: Positive = 1
    """Ranks that share each layer."""
    pipeline: Positive = 1
    """Stages, each of some of the layers."""
    virtual_pipeline: Positive = 1
    """Model chunks of each stage (interleaved pipelining)."""
    context: Positive = 1
    """Ranks that share each sequence."""
    expert: Positive = 1
    """Ranks that share the experts of a layer, taken from all ranks of a pipeline stage."""
    sequence_parallel: bool = False
    """Norms and residuals cut over the tensor-parallel ranks by tokens; experts need it where tensor is above 1."""


class Lora(Section, frozen=True, kw_only=True):
    """Low-rank adapters (arXiv 2106.09685) on linear layers of the policy; nothing else of it is trained."""

    rank: Annotated[int, Meta(ge=1, le=65536)] = 16
    alpha: PositiveFloat = 32.0
    """What an adapter gives is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Hugging Face names of linear layers. Empty: what the model has of q_proj, k_proj, v_proj, o_proj, gate_proj,
    up_proj and down_proj. Routed experts, the embedding and the output layer have no adapters."""


class Trainer(Section, frozen=True, kw_only=True):
    kind: Literal["fsdp", "megatron"] = "fsdp"
    """fsdp: any transformers model, sharded over all trainer ranks; megatron: cut as `parallel` says."""
    parallel: Parallel = field(default_factory=Parallel)
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Of forward and backward; masters, gradients' sums and optimizer state are float32."""
    float32_output: bool = False
    """Logits of all models are computed in float32, by the trainer and by the policy's engines that the run starts, so
    that their log-probs differ less in bfloat16 (MiniMax-M1, arXiv 2506.13585). In float32 they are anyhow."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    critic_optimizer: Optimizer | None = None
    """Empty: as `optimizer`."""
    lora: Lora | None = None
    """Empty: all weights of the policy are trained."""
    num_updates: Positive = 1
    """Optimizer steps a batch is split into."""
    max_tokens: Positive = 8192
    """Token budget of a micro-batch; a longer sequence gets its own."""
    recompute: Literal["none", "full"] = "none"
    """full: of each layer only its input is kept for backward, which computes the layer again: less memory, a third
    more work."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """torch threads of a trainer rank on CPU; 0: the node's cores over its trainer ranks and engines."""

    @property
    def widens_output(self) -> bool:
        """Whether logits are computed in another precision than the rest."""
        return self.float32_output and self.precision != "float32"


class Sync(Section, frozen=True, kw_only=True):
    """How weights reach the engines."""

    channel: Literal["broadcast", "disk", "ipc", "delta"] = "broadcast"
    """broadcast: over a process group; disk: safetensors in `folder`; ipc: memory that trainer ranks share with engines
    beside them; delta: what changed since the last push, over a process group or through `folder`, if there is one."""
    folder: str = ""
    """Where versions are put, in a folder of the run's own; every engine's node must see it. Empty: the run folder."""
    bucket_bytes: Positive = 64 * 1024 * 1024
    """Of tensors that travel together: while one bucket does, the next is put together. A larger tensor goes alone."""
    pause: Literal["abort", "retract", "in_place"] = "retract"
    """What running requests meet while weights change: end early, drop their KV cache, or keep it."""
    verify: bool = True
    """Compare what every engine makes of a prompt with what the trainer does after each push, and checksums of all
    weights where an engine has them."""
    timeout_s: PositiveFloat = 600.0

    @property
    def via(self) -> Literal["group", "folder"]:
        """How a push travels."""
        return "folder" if self.channel in ("disk", "ipc") or (self.channel == "delta" and self.folder) else "group"


class Cluster(Section, frozen=True, kw_only=True):
    mode: Literal["split", "colocated"] = "split"
    num_train_nodes: Count = 1
    num_rollout_nodes: Annotated[int, Meta(ge=0, le=10**6)] = 1
    num_spare_nodes: Annotated[int, Meta(ge=0, le=10**6)] = 0
    """Under Slurm: nodes asked for beside those in use; one of them takes the place of a node that is lost."""


class Staleness(Section, frozen=True, kw_only=True):
    max_versions: NonNegative = 0
    """How many versions older than the policy that is trained a group may start; 0 is synchronous."""


class Checkpoint(Section, frozen=True, kw_only=True):
    interval: NonNegative = 10
    """Steps between checkpoints; 0: only at the end and when told to stop."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    export: bool = True
    """Write a Hugging Face folder to hf/ at the end."""


class EvalSet(DataSet, frozen=True, kw_only=True):
    num_samples: Count = 1
    """Answers to each prompt; pass@k is reported for k = 1 and powers of two up to it."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    limit: NonNegative = 0
    """Use only the first so many prompts; 0: all."""
    shuffle: bool = False


class Evaluation(Section, frozen=True, kw_only=True):
    interval: NonNegative = 0
    """Steps between evaluations, the first before step 0; 0: none on the way. One at the end if there are sets."""
    sets: tuple[EvalSet, ...] = ()


class Tracking(Section, frozen=True, kw_only=True):
    tensorboard: bool = True
    samples_per_step: NonNegative = 32
    """Trained samples written as text to samples/ each step."""


class Limits(Section, frozen=True, kw_only=True):
    """Every wait has a bound; these are the ones a slow site may want to raise."""

    heartbeat_s: Annotated[float, Meta(ge=1.0, le=1e9)] = 60.0
    """Silence after which an agent or trainer rank counts as lost. Under 30 s healthy ranks were declared lost."""
    start_s: PositiveFloat = 900.0
    """From the start of a rank or engine until it is ready."""
    rollout_s: PositiveFloat = 3600.0
    """Without any group finished."""
    train_s: PositiveFloat = 3600.0
    """One batch."""
    stop_s: PositiveFloat = 120.0
    """From the order to stop until the state is saved and the ranks have ended; then they are killed."""
    engine_restarts: NonNegative = 3
    """Times one engine slot is restarted without a finished group in between."""
    mismatch: NonNegativeFloat = 0.0
    """Mean distance of the engines' and the trainer's log-probs of a step's tokens (metric `mismatch`) above which the
    run stops; 0: never. In bfloat16 0.01 is usual, and several times that in small models, whose logits are large; what
    was sampled by older versions is further off."""
    attempts: NonNegative = 3
    """Attempts the supervisor starts after a lost peer or engine without a new step in between."""


class RunConfig(Section, frozen=True, kw_only=True):
    """One experiment."""

    name: Name
    seed: int = 0
    num_steps: NonNegative
    deterministic: bool = False
    """Bit for bit repeatable, also over kills and resumes; see docs/determinism.md."""
    models: Models
    data: tuple[DataSet, ...]
    rollout: Rollout
    algorithm: AlgorithmChoice = field(default_factory=AlgorithmChoice)
    trainer: Trainer = field(default_factory=Trainer)
    sync: Sync = field(default_factory=Sync)
    cluster: Cluster = field(default_factory=Cluster)
    staleness: Staleness = field(default_factory=Staleness)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluation: Evaluation = field(default_factory=Evaluation)
    tracking: Tracking = field(default_factory=Tracking)
    limits: Limits = field(default_factory=Limits)
    site: str = "local"
    """A file in configs/site, or a path."""
    runs_dir: str = "runs"
    """Run folders are made in here."""
    code_dir: str = ""
    """Where modules of your own are looked for last, after the current directory and PYTHONPATH. Empty: beside the
    file."""
