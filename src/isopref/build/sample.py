"""`isopref sample`: answers of models to the prompts of a file, in this process or from a server.

Answers are saved by key as they arrive (sample/answers.py). The file is written once all of them are complete.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from isopref.build.hardware import check_hardware
from isopref.build.reference import policy_identity
from isopref.build.requests import in_parallel, token_progress
from isopref.build.run import Run, opened_run, quiet_libraries
from isopref.config.schema import Config
from isopref.data.chat import PairEncoder, TokenizeOptions
from isopref.data.omissions import Given
from isopref.data.sources import read_source
from isopref.data.template_files import NO_TEMPLATE
from isopref.errors import ConfigError, DataError, ModelError, RunError
from isopref.ledger import Ledger, check_out
from isopref.models import conversion, hf, writer
from isopref.models.finite import check_finite
from isopref.models.policy import Policy
from isopref.models.reward import is_reward_model
from isopref.models.slots import check_slots
from isopref.ops.memory import ran_out
from isopref.reference.store import key_of
from isopref.remote import Server, server
from isopref.runs.files import CONFIG_FILE, MODEL_FOLDER
from isopref.sample.answers import Answer, Asked, Sampling, answer_key, answer_seed, read_answers, records
from isopref.sample.prompts import Prompt, every, read_prompts
from isopref.types import IntArray

PROMPT_COLUMNS = ("prompt", "instruction", "input", "system", "history", "tools", "messages", "chat_template_kwargs")
ROWS = {"cpu": 32, "cuda": 256}  # answers generated at a time
REQUESTS = 16  # in flight


@dataclass(frozen=True)
class Job:
    """The arguments of `isopref sample`. `models` are paths, or names of a server's models; empty: the default one."""

    prompts: str
    out: Path
    sampling: Sampling
    answers: int = 1
    models: tuple[str, ...] = ()
    url: str | None = None
    parallel: int | None = None  # rows or requests at a time


def sample_file(config: Config, job: Job, *, name: str) -> None:
    """Answer every prompt of a file and write `job.out`. Raises UserError."""
    with opened_run(config, name) as run:
        quiet_libraries()
        check_hardware(run)
        if run.env.is_first:
            check_out(job.out, may_exist=True)
        with Ledger(job.out).alone() if run.env.is_first else nullcontext():
            prompts = _prompts(run, job)
            if job.url is not None:
                _from_server(run, job, prompts)
            else:
                _from_models(run, job, prompts)


def _prompts(run: Run, job: Job) -> list[Prompt]:
    data = run.config.data
    columns = {ours: theirs for ours, theirs in data.columns.items() if ours in PROMPT_COLUMNS}
    found = read_prompts(
        read_source(job.prompts, columns=columns), raw=data.template == NO_TEMPLATE, on_bad=data.on_bad
    )
    if not found.prompts:
        raise DataError(f"{job.prompts}: no usable prompts: {found.dropped} records dropped. Pass another file.")
    repeated = f", {found.repeated} repeated ones left out" if found.repeated else ""
    dropped = f", {found.dropped} dropped" if found.dropped else ""
    run.display.say(f"data  {job.prompts}: {len(found.prompts)} prompts{repeated}{dropped}")
    return found.prompts


class _Out:
    """The file of answers: those already known, and those added."""

    def __init__(self, run: Run, job: Job, asked: Sequence[Asked]):
        self.run, self.job, self.asked = run, job, asked
        self.ledger = Ledger(job.out)
        wanted = {one.key for one in asked}
        self.known: dict[str, Any] = {}
        if job.out.exists():
            self.known.update(read_answers(job.out))
            if self.known.keys() - wanted:
                raise RunError(
                    f"--out: {job.out} has answers of another model, to other prompts, or with other settings, and "
                    "will not be overwritten. Choose another name, or remove it."
                )
        self.known.update(self.ledger.read(wanted))
        run.env.barrier()  # ranks divide the missing answers among them, so all must read before any adds to the file
        if self.known:
            run.display.say(f"resume: {len(self.known)} of {len(asked)} answers are already sampled")

    @property
    def missing(self) -> list[Asked]:
        return [one for one in self.asked if one.key not in self.known]

    def add(self, answers: Mapping[str, Answer]) -> None:
        self.ledger.append(answers)

    def finish(self) -> None:
        """Write the file, once all ranks have added their share."""
        self.run.env.barrier()
        if not self.run.env.is_first:
            return
        wanted = {one.key for one in self.asked}
        self.known.update(self.ledger.read(wanted))
        assert self.known.keys() == wanted, "an answer is missing"
        found = [Answer(*self.known[key]) for key in wanted]
        self.ledger.finish(records(self.asked, self.known))
        cut = sum(not one.ended for one in found)
        ends = f", {cut} of them cut at --max-tokens" if cut else ""
        self.run.display.say(f"wrote {self.job.out}: {len(found)} answers to {len(found) // self._each} prompts{ends}")

    @property
    def _each(self) -> int:
        return self.job.answers * max(1, len(self.job.models))


# --- from models in this process -----------------------------------------------------------------------


def model_path(path: str) -> str:
    """The path of a model; a run folder stands for the model in it."""
    folder = Path(path).expanduser()
    return str(folder / MODEL_FOLDER) if (folder / CONFIG_FILE).exists() and (folder / MODEL_FOLDER).is_dir() else path


@dataclass(frozen=True)
class _Model:
    """A model that answers: its path, its content digest, and the prompts as it reads them."""

    path: str
    setting: str
    digest: str
    tokenizer: Any
    encoded: dict[str, IntArray]  # keyed by prompt digest
    policy: Policy | None  # while it is in memory

    def asked(self, prompts: Sequence[Prompt], job: Job) -> list[Asked]:
        def key(prompt: Prompt, number: int) -> str:
            read = blake2b(self.encoded[prompt.digest].tobytes(), digest_size=16).hexdigest()
            return answer_key(self.digest, prompt, read, job.sampling, number)

        return [Asked(key(prompt, n), prompt, n, self.path) for prompt, n in every(prompts, job.answers)]


def _from_models(run: Run, job: Job, prompts: Sequence[Prompt]) -> None:
    setting = "--model" if job.models else "model.path"
    paths = [model_path(path) for path in job.models or (run.config.model.path,)]
    if len(set(paths)) < len(paths):
        raise ConfigError("--model: the same model is given twice. Remove one of them.")
    # Compute the keys of all answers first, so that a file with other answers is refused before any work.
    models = [_open(run, path, setting, prompts, keep=len(paths) == 1) for path in paths]
    if len({one.digest for one in models}) < len(models):
        raise ConfigError(f"--model: two of {', '.join(paths)} have the same weights. Remove one of them.")
    asked = [one.asked(prompts, job) for one in models]
    out = _Out(run, job, [key for of_model in asked for key in of_model])
    missing = {one.key for one in out.missing}
    for model, of_model in zip(models, asked, strict=True):
        left = [one for one in of_model if one.key in missing]
        if left:
            _write(run, job, model, left, out)
    out.finish()


def _open(run: Run, path: str, setting: str, prompts: Sequence[Prompt], *, keep: bool) -> _Model:
    trust = run.config.model.trust_remote_code
    tokenizer = hf.load_tokenizer(path, trust_remote_code=trust, setting=setting)
    policy = _load(run, path, setting)
    digest = key_of(policy_identity(run, policy))
    encoded = _encode(run, policy, tokenizer, prompts)
    return _Model(path, setting, digest, tokenizer, encoded, policy if keep else None)


def _load(run: Run, path: str, setting: str) -> Policy:
    """A model in the dtype of the forward pass, on this rank's device. An adapter is merged into its base."""
    trust, dtype = run.config.model.trust_remote_code, getattr(torch, run.config.model.pass_dtype)
    if is_reward_model(path, trust_remote_code=trust, setting=setting):
        raise ConfigError(f"{setting}: {path} is a reward model, which writes no text. Pass a language model.")
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust, "setting": setting}
    model = conversion.read_checkpoint(path, **options) if hf.is_olmo_core(path) else hf.load_model(path, **options)
    policy = Policy(model)
    check_finite(policy.model, f"{setting}: {path}")
    policy.move_to(run.env.device)
    policy.eval()
    return policy


def _encode(run: Run, policy: Policy, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, IntArray]:
    """The tokens of all prompts. Raises DataError for one that leaves no room for an answer."""
    template, most = run.config.data.template, _most_tokens(run, policy)
    options = TokenizeOptions(template=template, max_length=None, truncation="drop", on_bad="error")
    encoder, found = PairEncoder(tokenizer, options), {}
    for prompt in prompts:
        (tokens,) = encoder.encode_prompts([prompt.turns], Given(prompt.tools, prompt.template_kwargs))
        if len(tokens) == 0 or (most is not None and len(tokens) >= most):
            raise DataError(
                f"{prompt.origin}: the prompt has {len(tokens)} tokens, but a sequence may have at most {most} "
                "(data.max_length and the model's context length), so there is no room for an answer. Remove it."
            )
        found[prompt.digest] = tokens
    return found


def _most_tokens(run: Run, policy: Policy) -> int | None:
    """Maximum tokens of a prompt with its answer."""
    limits = [run.config.data.max_length, hf.context_length(policy.model.config)]
    return min((limit for limit in limits if limit is not None), default=None)


def _write(run: Run, job: Job, model: _Model, left: Sequence[Asked], out: _Out) -> None:
    """Generate this rank's share of the missing answers, with fewer rows at a time if memory runs out."""
    policy = model.policy or _load(run, model.path, model.setting)
    choice = _choice(job.sampling, model)
    in_slots = _writes_in_slots(run, policy)
    rows = job.parallel or ROWS[run.env.device.type]
    by_prompt: dict[str, list[Asked]] = {}
    for one in left:
        by_prompt.setdefault(one.prompt.digest, []).append(one)
    mine = list(by_prompt.values())[run.env.rank :: run.env.world_size]
    most = _most_tokens(run, policy)
    done: set[str] = set()
    with token_progress(run, "sample", sum(map(len, mine))) as progress:
        while True:
            groups = [[one for one in group if one.key not in done] for group in mine]
            groups = [group for group in groups if group]
            requests = [_request(model.encoded[group[0].prompt.digest], group, job.sampling, most) for group in groups]
            try:
                write = writer.write if in_slots else writer.write_batches
                for answer in write(policy, requests, choice, rows=rows):
                    asked = groups[answer.request][answer.number]
                    text = str(model.tokenizer.decode(answer.tokens, skip_special_tokens=True)).strip()
                    out.add({asked.key: Answer(text, answer.ended, len(answer.tokens))})
                    done.add(asked.key)
                    progress(len(answer.tokens))
                return
            except RuntimeError as error:
                if not ran_out(error) or rows == 1:
                    raise
                rows = max(1, rows // 2)
                run.display.say(f"warning: out of memory; writing {rows} answers at a time (--parallel)")
            gc.collect()
            if run.env.device.type == "cuda":
                torch.cuda.empty_cache()


def _choice(sampling: Sampling, model: _Model) -> writer.Choice:
    stops = dict.fromkeys((int(model.tokenizer.eos_token_id), *hf.stop_tokens(model.tokenizer.name_or_path)))
    return writer.Choice(sampling.temperature, sampling.top_p, tuple(stops))


def _request(prompt: IntArray, group: Sequence[Asked], sampling: Sampling, most: int | None) -> writer.Request:
    seeds = tuple(answer_seed(one.prompt, sampling, one.number) for one in group)
    room = sampling.max_tokens if most is None else min(sampling.max_tokens, most - len(prompt))
    return writer.Request(prompt, seeds, (room,) * len(seeds))


def _writes_in_slots(run: Run, policy: Policy) -> bool:
    try:
        check_slots(policy)
    except ModelError as error:
        run.display.say(f"note: {error}; answers are written by transformers' generate, which is slower")
        return False
    return True


# --- from a server -------------------------------------------------------------------------------------


def _from_server(run: Run, job: Job, prompts: Sequence[Prompt]) -> None:
    assert job.url is not None
    if run.env.world_size > 1:
        raise ConfigError(
            "--nproc: with --url, one process sends all requests. Remove it; to send N at a time, set --parallel N."
        )
    if run.config.data.template is not None:
        raise ConfigError("data.template: a server uses its own chat template. Remove it, or --url.")
    remote = server(job.url, setting="--url")
    names = job.models or remote.models()[:1]
    if not names:
        raise ConfigError(f"--url: {job.url} lists no models. Name one: --model NAME.")
    asked = [
        Asked(answer_key(f"{remote.url} {name}", prompt, "", job.sampling, n), prompt, n, name)
        for name in names
        for prompt, n in every(prompts, job.answers)
    ]
    out = _Out(run, job, asked)
    run.display.say(f"model {', '.join(names)} at {remote.url}")
    missing = out.missing
    with token_progress(run, "sample", len(missing)) as progress:
        for one, answer in _replies(remote, missing, job):
            out.add({one.key: answer})
            progress(answer.tokens or 0)
    out.finish()


def _replies(remote: Server, missing: Sequence[Asked], job: Job) -> Iterator[tuple[Asked, Answer]]:
    """Answers as they arrive. After a failure, requests in flight are still awaited and yielded."""
    sampling = job.sampling

    def ask(one: Asked) -> Answer:
        reply = remote.complete(
            one.model,
            one.prompt.messages,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=answer_seed(one.prompt, sampling, one.number) % 2**31,
            tools=one.prompt.tools,
            chat_template_kwargs=dict(one.prompt.template_kwargs) or None,
        )
        return Answer(reply.text.strip(), reply.ended, reply.tokens)

    yield from in_parallel(ask, missing, job.parallel or REQUESTS)
