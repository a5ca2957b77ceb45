//! The answer as a table: a row a figure, a column a run.

use divvy_cli::table::Table;
use divvy_fleet::Report;

use super::{Answer, OneRun};

pub(super) fn table(answer: &Answer) -> String {
    let mut text = String::new();
    let mut figures = Table::new([""]);
    let names: Vec<&str> = answer.runs.iter().map(|run| run.name.as_str()).collect();
    figures.widen(&names);
    let mut row = |what: &str, value: &dyn Fn(&Report) -> String| {
        let values = answer.runs.iter().map(|run| value(&run.report));
        figures.cells(std::iter::once(what.to_owned()).chain(values).collect());
    };
    row("nodes", &|of| of.nodes.to_string());
    row("pods", &|of| of.pods.to_string());
    row("accepted", &|of| of.accepted.to_string());
    row("waiting at the last arrival", &|of| {
        of.waiting_at_last_arrival.to_string()
    });
    row("waiting at the end", &|of| {
        of.waiting.iter().map(|w| w.pods).sum::<usize>().to_string()
    });
    row("mean wait", &|of| duration(of.mean_wait_seconds));
    row("wait of 95 %", &|of| duration(of.p95_wait_seconds));
    row("memory held, mean", &|of| format!("{} %", of.full_percent));
    row("memory held, peak", &|of| format!("{} %", of.peak_percent));
    row("free at the last arrival", &|of| {
        format!("{} GiB", of.free_gib)
    });
    text += &figures.render(0);
    text += "\n\nFree at the last arrival, and of no use to further pods of a request:\n";
    let mut stranded = Table::new(["request"]);
    for run in &answer.runs {
        let name = |what: &str| {
            if run.name.is_empty() {
                what.to_owned()
            } else {
                format!("{} {what}", run.name)
            }
        };
        let names = [name("more pods"), name("stranded GiB"), name("cores")];
        stranded.widen(&names.each_ref().map(String::as_str));
    }
    let requests = answer
        .runs
        .first()
        .map(|run| run.report.stranded.as_slice())
        .unwrap_or_default();
    for (number, form) in requests.iter().enumerate() {
        let mut cells = vec![form.request.clone()];
        for run in &answer.runs {
            let Some(of) = run.report.stranded.get(number) else {
                continue;
            };
            cells.extend([
                of.fits.to_string(),
                of.stranded_gib.to_string(),
                of.stranded_cores.to_string(),
            ]);
        }
        stranded.cells(cells);
    }
    text += &stranded.render(0);
    if answer
        .runs
        .iter()
        .any(|run| run.report.stranded_is_estimated)
    {
        text += "\n(estimated from 200 of the different nodes)";
    }
    text.push('\n');
    for run in &answer.runs {
        text += &waiting(run);
    }
    for note in &answer.notes {
        text += &format!("\nnote: {note}");
    }
    text += "\n\nNot modelled:";
    for what in &answer.not_modelled {
        text += &format!("\n- {what}");
    }
    text
}

fn waiting(run: &OneRun) -> String {
    let name = if run.name.is_empty() {
        String::new()
    } else {
        format!("{}: ", run.name)
    };
    let line = |of: &divvy_fleet::Waiting| {
        format!("\n{name}{} × {} waits: {}", of.pods, of.request, of.reason)
    };
    run.report.waiting.iter().map(line).collect()
}

fn duration(seconds: f64) -> String {
    if seconds < 120.0 {
        format!("{seconds} s")
    } else if seconds < 7_200.0 {
        format!("{:.1} min", seconds / 60.0)
    } else {
        format!("{:.1} h", seconds / 3_600.0)
    }
}
