"""`isopref sample`: its arguments. Imports no torch."""

from pathlib import Path
from typing import Annotated

import typer

from isopref.cli.arguments import ConfigFile, NumProcesses, Overrides, check_path, in_home, start_processes, words
from isopref.config.load import load_config

Prompts = Annotated[
    str,
    typer.Option(metavar="FILE", help="Prompts, with or without answers: a file, folder or hub name, like data.train."),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="Model, adapter or run to sample from; repeatable. With --url: the name of a model on the server. "
        "Default: model.path.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(metavar="URL", help="OpenAI-compatible server to sample from, e.g. http://localhost:8000/v1."),
]
Temperature = Annotated[
    float, typer.Option(min=0, metavar="T", help="Sampling temperature. 0: greedy, the most likely token each time.")
]
TopP = Annotated[
    float,
    typer.Option(
        min=0.001, max=1, metavar="P", help="Sample from the most likely tokens, whose probabilities add up to P."
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Maximum tokens per answer.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Random seed. Another seed gives other answers.")]
Parallel = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Answers to generate at a time. Default: 32 on a CPU, 256 on a GPU. With --url: requests in flight, 16.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", callback=in_home, help="Output file. Default: NAME.answers.jsonl in the current folder."
    ),
]


def sample(
    config_file: ConfigFile,
    overrides: Overrides = None,
    *,
    prompts: Prompts,
    answers: Annotated[int, typer.Option(min=1, metavar="K", help="Answers per prompt and model.")] = 4,
    model: Models = None,
    url: Url = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 512,
    seed: Seed = 0,
    parallel: Parallel = None,
    out: Out = None,
    nproc: NumProcesses = 1,
) -> None:
    """Sample several answers to each prompt.

    Writes one JSON line per prompt: the prompt, its responses, and for each response its model, whether it ended, its
    number of tokens and its key. isopref judge adds scores. To resume a stopped command, run it again; with more
    prompts or answers, only the new ones are sampled. The API key is read from ISOPREF_API_KEY or OPENAI_API_KEY.

    \b
    Examples:
      isopref sample my.yaml --prompts prompts.jsonl --answers 4
      isopref sample my.yaml --prompts prompts.jsonl --model runs/first --temperature 0.7 --nproc 8
      isopref sample my.yaml --prompts prompts.jsonl --url http://localhost:8000/v1
    """
    config = load_config(config_file, overrides or ())
    check_path("--prompts", prompts)
    models = tuple(model or ())
    for one in models if url is None else ():  # otherwise they are names on the server
        check_path("--model", one)
    out = out or Path(f"{Path(prompts).stem}.answers.jsonl")
    options = {
        "--prompts": prompts,
        "--answers": answers,
        "--temperature": temperature,
        "--top-p": top_p,
        "--max-tokens": max_tokens,
        "--seed": seed,
        "--out": out,
        "--model": models,
        "--url": url,
        "--parallel": parallel,
    }
    start_processes(nproc, ["sample", *words(options), str(config_file), *(overrides or ())])
    from isopref.build.sample import Job, sample_file
    from isopref.sample.answers import Sampling

    sampling = Sampling(temperature, top_p, max_tokens, seed)
    job = Job(prompts, out, sampling, answers, models, url, parallel)
    sample_file(config, job, name=config_file.stem)
