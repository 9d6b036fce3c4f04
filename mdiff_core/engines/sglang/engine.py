"""SGLang-diffusion as an engine: a server of its own, whose answers are checked before anybody sees them."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

import torch

from mdiff_core import policies
from mdiff_core.contracts import Family, KernelMaker, Served, Serving
from mdiff_core.engines.sglang.answers import WrongAnswer, conditions_of, decode, samples_of, trajectory_of
from mdiff_core.engines.sglang.options import SGLangOptions, command_line, environment, located
from mdiff_core.engines.sglang.requests import SDE_TYPES, noise_level, sampling_body
from mdiff_core.engines.sglang.server import Server
from mdiff_core.engines.sglang.texts import Texts, lacking
from mdiff_core.engines.sglang.weights import FromFiles, FromTensors, Sync, Update, deliver_folder
from mdiff_core.errors import BadSetting, EngineFailed
from mdiff_core.options import Options
from mdiff_core.sampler import latent_steps, shared_plan
from mdiff_core.types import Condition, PolicyVersion, Request, Trajectory

ROLLOUT = "/rollout/generate"
CHECK_SECONDS = 0.5
"""Between looks at the server's processes while it works."""


class SGLangEngine:
    """Draws each request as one batch of a server of its own, several requests at a time; see contracts.Engine.

    The noise of a sample's second and later stochastic steps depends on how many samples its request has.
    """

    Options: ClassVar[type[Options]] = SGLangOptions
    batches_at_once: ClassVar[int] = 2

    def __init__(
        self,
        options: SGLangOptions,
        *,
        family: Family,
        model: str,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelMaker,
    ) -> None:
        self._options, self._model, self._dtype, self._device, self._kernels = options, model, dtype, device, kernels
        self._family, self._serving = family, serving_of(family)
        self._pool = ThreadPoolExecutor(options.in_flight * self.batches_at_once, thread_name_prefix="sglang")
        self._policy: PolicyVersion | None = None
        self._texts = Texts()
        self._server: Server | None = None
        self._start()

    @classmethod
    def check(cls, options: SGLangOptions, *, family: Family, kernel: str, gpus: float) -> None:
        """BadSetting for a family without a pipeline in SGLang, a kernel it lacks, or GPUs that do not add up."""
        serving_of(family)
        check_kernel(kernel)
        shares = options.gpus == 1 and 0 <= gpus <= 1
        if gpus != options.gpus and not shares:
            raise BadSetting(
                f"rollout.gpus_per_engine: {gpus:g}, but rollout.engine.options ask for {options.gpus} GPUs "
                "(tensor_parallel x ulysses x ring, twice with cfg_parallel); make the two equal"
            )

    def load(self, policy: PolicyVersion, weights: policies.Weights = "live") -> str:
        """Deliver the policy's weights and verify them; a LoRA after full weights, or the other way, starts the server anew."""
        if self._server is None:
            raise EngineFailed("sglang engine: it was closed; make a new one")
        found = policies.tensors(policy, weights)
        try:
            if policy.kind == "base":
                self._restore()
            else:
                self._deliver(policy, weights, found)
        except EngineFailed:
            self._server.abandon()
            raise
        self._policy, self._checksum = policy, policies.checksum_of(policy, weights)
        self._texts.forget_sent()
        return self._checksum

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[Trajectory, Mapping[str, Condition]]]:
        """The requests side by side, each a batch of the server; they share one plan."""
        plan = shared_plan("sglang", requests)
        check_kernel(plan.kernel)
        if self._policy is None or self._server is None:
            raise EngineFailed("sglang engine: asked for samples without a policy; call load first")
        policy, kept = self._policy, latent_steps(plan.sde_steps)
        schedule = self._family.sigmas(self._model, steps=plan.steps, width=plan.width, height=plan.height)
        eta = noise_level(self._kernels(plan.kernel, plan.kernel_options), plan)
        negative = plan.negative if plan.guidance > 1 else None
        texts = [request.prompt.text for request in requests]
        held = self._texts.known(texts, negative)
        bringing = lacking(held, texts, negative)
        bodies = [
            sampling_body(request, self._serving, eta, kept, self._device.type, conditions=bring)
            for request, bring in zip(requests, bringing, strict=True)
        ]
        answers = self._ask(self._server, bodies)
        try:
            for request, bring, answer in zip(requests, bringing, answers, strict=True):
                entries = decode(answer)
                samples = samples_of(entries, request, kept, schedule, self._device)
                if bring:
                    found = conditions_of(entries, request.prompt.text, negative, self._serving)
                    held.update(found)
                    self._texts.remember(found)
                for i, sample in enumerate(samples):
                    yield (
                        trajectory_of(request, i, sample, policy, self._checksum),
                        self._texts.fresh(held, request.prompt.text, negative),
                    )
        except WrongAnswer as error:
            raise self._server.failed(str(error)) from error

    def close(self) -> None:
        """End the server."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._server is not None:
            self._server.close()
        self._server = self._policy = None

    def _start(self) -> None:
        on_gpu = self._device.type == "cuda"
        arguments = command_line(self._options, self._serving, self._model, self._dtype, on_gpu)
        self._server = Server(arguments, environment(self._options, self._model, on_gpu), self._options.start_seconds)
        self._sync: Sync = (
            FromFiles(self._server) if self._options.sync == "artifact" else FromTensors(self._server, self._device)
        )
        self._holds = "base"

    def _restore(self) -> None:
        assert self._server is not None
        if self._holds == "full":
            deliver_folder(self._server, located(self._model))
            self._holds = "base"  # the same layers under the same names, so that a LoRA may follow
        self._sync.withdraw()

    def _deliver(self, policy: PolicyVersion, weights: policies.Weights, found: Mapping[str, torch.Tensor]) -> None:
        assert self._server is not None
        if self._holds not in ("base", policy.kind):
            self._server.close()
            self._start()
        self._holds = policy.kind
        is_lora = policy.kind == "lora"
        update = Update(
            name=f"{policy.checksum[:24]}-{weights}",
            tensors=found if is_lora else {name: value.to(self._dtype) for name, value in found.items()},
            adapter=policies.adapter_of(policy) if is_lora else None,
            file=None if is_lora else policies.weight_file(policy, weights),
        )
        self._sync.deliver(update)

    def _ask(self, server: Server, bodies: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """All answers; ends the server as soon as it cannot give one."""
        futures: list[Future[bytes]] = [
            self._pool.submit(server.post, ROLLOUT, body, self._options.answer_seconds) for body in bodies
        ]
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, CHECK_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if waiting:
                    server.check()
        except EngineFailed:
            server.abandon()
            raise
        finally:
            for future in waiting:
                future.cancel()
        return [future.result() for future in futures]


def serving_of(family: Family) -> Serving:
    """BadSetting when SGLang has no pipeline for it."""
    if not isinstance(family, Served):
        raise BadSetting(
            f"rollout.engine.name: 'sglang' has no pipeline of its own for {type(family).__name__}; use 'diffusers'"
        )
    return family.serving()


def check_kernel(kernel: str) -> None:
    """BadSetting for one that SGLang lacks."""
    if kernel not in SDE_TYPES:
        raise BadSetting(
            f"sampling.kernel.name: '{kernel}' is not one that SGLang draws; use one of {', '.join(SDE_TYPES)}, "
            "or rollout.engine.name=diffusers"
        )
