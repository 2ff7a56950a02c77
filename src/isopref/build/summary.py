"""The end of a run: its report page, and what to do next."""

import logging
from pathlib import Path

from isopref.build.run import Run
from isopref.models import hf
from isopref.places import write_whole
from isopref.report.degeneration import signs
from isopref.report.html import page
from isopref.runs.files import LOG_FILE, METRICS_FILE, REPORT_FILE
from isopref.runs.read import read_run

log = logging.getLogger(__name__)


def write_report(run: Run) -> None:
    """Write the report into the run folder. The run is done: a failure here must not look like a failed run."""
    if not run.env.is_first:
        return
    try:
        record = read_run(run.folder)
        for sign in signs(record):
            run.display.say(f"warning: {sign}")
        write_whole(run.folder / REPORT_FILE, page([record]).encode())
    except Exception as error:
        log.exception("failed to write the report")
        run.display.say(
            f"warning: failed to write {REPORT_FILE} ({type(error).__name__}: {error}). The run itself is complete; "
            f"see {LOG_FILE}."
        )


def _loader(run: Run) -> str:
    """The class that loads what the run has exported."""
    if run.loss.readout == "logp":
        return "AutoModelForCausalLM"
    return f"Auto{'' if run.config.model.adapter is None else 'Peft'}ModelForSequenceClassification"


def say_end(run: Run, seconds: float) -> None:
    """Print how long the run took, where its results are, and what to type next."""
    minutes, rest = divmod(int(seconds), 60)
    run.display.say(f"\nDone in {f'{minutes} min ' if minutes else ''}{rest} s.")
    if (run.folder / REPORT_FILE).exists():
        run.display.say(f"  report      {run.folder / REPORT_FILE}, for a browser")
    run.display.say(f"  metrics     {run.folder / METRICS_FILE}")
    if run.config.run.export:
        adapted = run.config.model.adapter is not None
        what = "an adapter in peft's format" if adapted else "a Hugging Face folder"
        load = f":\n              {_loader(run)}.from_pretrained({str(run.model_folder)!r}"
        load += ", num_labels=1)" if adapted and run.loss.readout == "reward" else ")"
        if adapted and hf.locate(run.config.model.path, setting="model.path").gguf_file:
            load = "; its base is a GGUF file, so only isopref can load it"
        merge = f"  one model   isopref merge {run.model_folder} FOLDER\n" if adapted else ""
        if run.config.model.native:
            run.display.say(f"  model       {run.native_folder}, an OLMo-core checkpoint")
        use = f"isopref score FILE --model {run.model_folder}; " if run.loss.readout == "reward" else ""
        init = "" if Path("my.yaml").exists() else "; isopref init my.yaml, to write your own config"
        run.display.say(
            f"  model       {run.model_folder}, {what}{load}\n{merge}"
            f"  next        {use}isopref ls; isopref compare {run.folder} OTHER_RUN{init}"
        )
