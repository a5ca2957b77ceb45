//! The demo's report for people, in 80 columns unless it is wide.

use std::collections::BTreeSet;

use super::gpus::GpuPicture;
use super::report::{
    self, ClaimReport, DeviceReport, PublishedDevice, Report, Round, Scenario, State,
};
use divvy_api::names::capacity;
use divvy_cli::format::shortened;
use divvy_cli::table::Table;
use divvy_model::Form;
use divvy_why::cause::{Cause, Mig};

use divvy_why::device::kind;

mod cdi;
mod paint;

/// Columns of a terminal that no one has made wider.
const WIDTH: usize = 80;
/// Lines of a reason, and notes, that are shown unless the report is wide.
const SHOWN: usize = 3;

/// Looks of the report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    /// Use of colours.
    pub(crate) colour: bool,
    /// Permission for lines longer than 80 columns, which show more.
    pub(crate) wide: bool,
    /// Full view of every manifest, not only of the first that ran.
    pub(crate) all: bool,
}

/// The report as text.
pub(crate) fn render(report: &Report, look: Look) -> String {
    let mut lines = head(report, look);
    let full = |scenario: &Scenario| scenario.skipped.is_none() && scenario.problem.is_none();
    let first = report.scenarios.iter().position(full).unwrap_or(0);
    for (number, scenario) in report.scenarios.iter().enumerate() {
        if look.all || number == first {
            lines.push(String::new());
            lines.extend(in_full(scenario, look));
            lines.push(String::new());
        } else {
            lines.extend(in_one_line(scenario, look));
        }
    }
    if look.wide {
        lines.extend(cdi::document(report));
    }
    lines.push(String::new());
    lines.extend(summary(report, look));
    let mut text = lines.join("\n");
    while text.contains("\n\n\n") {
        text = text.replace("\n\n\n", "\n\n");
    }
    text
}

fn head(report: &Report, look: Look) -> Vec<String> {
    let offer = match report.policies.as_slice() {
        [] => by_default(&report.published),
        names => format!("GpuPolicy {} says what they may become.", names.join(", ")),
    };
    let of_gpus = report
        .published
        .iter()
        .filter_map(|device| device.product.as_deref());
    let products: Vec<&str> = of_gpus.collect::<BTreeSet<_>>().into_iter().collect();
    let text = format!(
        "A node with simulated GPUs, {} ({}), publishes {}. {offer}",
        report.sim,
        products.join(", "),
        number(report.published.len(), "device")
    );
    let mut lines = wrapped(&text, "", "");
    // Where nothing wants devices, those that there are is the answer.
    let wants_none = |scenario: &Scenario| {
        scenario.problems().is_empty()
            && scenario.skipped.is_none()
            && scenario.rounds.iter().all(|round| round.claims.is_empty())
    };
    if look.wide || report.scenarios.iter().all(wants_none) {
        lines.extend(published(report, look).render(2).lines().map(str::to_owned));
        lines.push(format!(
            "Published {} ms after the plugin's start.",
            report.published_after_ms
        ));
    }
    let has_taint = |device: &&PublishedDevice| !device.taints.is_empty();
    let tainted: Vec<PublishedDevice> =
        report.published.iter().filter(has_taint).cloned().collect();
    if !tainted.is_empty() && !look.wide {
        let taints: BTreeSet<&str> = tainted
            .iter()
            .flat_map(|device| &device.taints)
            .map(String::as_str)
            .collect();
        let names: Vec<String> = report::rows(&tainted)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let taints = taints.into_iter().collect::<Vec<_>>().join(", ");
        let text = format!("Tainted with {taints}: {}", names.join(" "));
        lines.extend(cut(wrapped(&text, "", "  "), look));
    }
    lines.extend(notes(&report.notes, look));
    lines
}

/// Says what is offered without a policy.
fn by_default(published: &[PublishedDevice]) -> String {
    let has = |wanted: Form| {
        let kinds = published.iter().filter_map(|device| kind(&device.name));
        kinds.into_iter().any(|kind| kind.form() == wanted)
    };
    let can = |mig: Mig| published.iter().any(|device| device.mig == Some(mig));
    let whole = if can(Mig::AtOnce) {
        "each GPU is offered whole; shares and partitions need one"
    } else if can(Mig::WithReset) {
        "each GPU is offered whole; shares need one, and partitions need MIG mode on"
    } else {
        "each GPU is offered whole; shares need one"
    };
    let offer = match (has(Form::WHOLE), has(Form::PARTITIONS)) {
        (_, false) => whole,
        (false, true) => {
            "MIG mode is on, so each GPU is offered in partitions; shares need one, and MIG mode off"
        }
        (true, true) => {
            "a GPU in MIG mode is offered in partitions, any other whole; shares need one"
        }
    };
    format!("No GpuPolicy: {offer}.")
}

fn published(report: &Report, look: Look) -> Table {
    let mut table = Table::new(["DEVICE", "PRODUCT", "MEMORY", "TAINTS"]);
    if look.wide {
        table.widen(&["NUMA", "UUID"]);
    }
    let text = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    for (name, device) in report::rows(&report.published) {
        let mut cells = vec![
            name,
            text(device.product.clone()),
            text(device.memory_bytes.map(divvy_why::device::bytes)),
            text(Some(device.taints.join(", ")).filter(|taints| !taints.is_empty())),
        ];
        if look.wide {
            cells.extend([
                text(device.numa_node.map(|node| node.to_string())),
                text(device.uuid.clone()),
            ]);
        }
        table.cells(cells);
    }
    table
}

fn notes(notes: &[String], look: Look) -> Vec<String> {
    let shown = if look.wide { notes.len() } else { SHOWN };
    let mut lines: Vec<String> = notes
        .iter()
        .take(shown)
        .flat_map(|note| wrapped(&format!("note: {note}"), "  ", "    "))
        .collect();
    if notes.len() > shown {
        lines.push(format!(
            "  … and {} more notes (-o wide)",
            notes.len() - shown
        ));
    }
    lines
}

/// Shows the outcome of a scenario in one line.
fn in_one_line(scenario: &Scenario, look: Look) -> Vec<String> {
    let problems = scenario.problems();
    let (mark, text) = match (&scenario.skipped, problems.first()) {
        (Some(reason), _) => (paint::SKIPPED, format!("skipped: {reason}")),
        (None, Some(problem)) => {
            let lines = wrapped(problem, "    ", "    ");
            let head = format!("{} {}", paint::mark(paint::BAD, look.colour), scenario.name);
            return std::iter::once(head).chain(cut(lines, look)).collect();
        }
        (None, None) => (paint::GOOD, scenario.title.clone().unwrap_or_default()),
    };
    let text = shortened(
        &format!("{:<22}{text}", format!("{} ", scenario.name)),
        WIDTH - 2,
    );
    vec![format!("{} {text}", paint::mark(mark, look.colour))]
}

fn in_full(scenario: &Scenario, look: Look) -> Vec<String> {
    let ran = scenario.rounds.iter().any(|round| !round.claims.is_empty());
    let mark = match (&scenario.skipped, scenario.problems().is_empty()) {
        (Some(_), _) => paint::SKIPPED,
        // Nothing that asks for a GPU was tried.
        (None, true) if !ran => paint::SKIPPED,
        (None, true) => paint::GOOD,
        (None, false) => paint::BAD,
    };
    let title = scenario
        .title
        .as_ref()
        .map(|title| format!(": {title}"))
        .unwrap_or_default();
    let mut lines = wrapped(&format!("{}{title}", scenario.name), "", "  ");
    if let Some(first) = lines.first_mut() {
        *first = format!("{} {first}", paint::mark(mark, look.colour));
    }
    lines.extend(
        scenario
            .skipped
            .iter()
            .flat_map(|reason| wrapped(&format!("skipped: {reason}"), "  ", "    ")),
    );
    if !scenario.published.is_empty() {
        let rows = report::rows(&scenario.published)
            .into_iter()
            .map(|(name, _)| name);
        let text = format!("published: {}", rows.collect::<Vec<_>>().join(" "));
        lines.extend(cut(wrapped(&text, "  ", "    "), look));
    }
    // Doubtful parts of a manifest are often the way out of what it waits for: never cut.
    let whole = Look { wide: true, ..look };
    lines.extend(notes(&scenario.notes, whole));
    lines.extend(
        scenario
            .problem
            .iter()
            .flat_map(|problem| wrapped(problem, "  ", "    ")),
    );
    // What a claim has is a picture where GPUs are divided or a pod waits; else the table says it
    // all.
    let drawn = scenario.rounds.iter().any(|round| {
        let waits = round
            .claims
            .iter()
            .any(|claim| matches!(claim.state, State::Pending { .. }));
        waits || round.gpus.iter().any(GpuPicture::is_divided)
    });
    let namespace = namespace_of(scenario);
    for (number, round) in scenario.rounds.iter().enumerate() {
        if number > 0 {
            let ended: Vec<&str> = round
                .ended
                .iter()
                .map(|what| what.trim_start_matches("pod "))
                .collect();
            let ended = ended.join(", ").replace(&namespace, "");
            lines.extend([String::new(), format!("  then, after {ended} ended:")]);
        }
        let before = number
            .checked_sub(1)
            .and_then(|before| scenario.rounds.get(before));
        lines.extend(of_round(round, before, drawn, &namespace, look));
    }
    lines
}

/// The namespace that all claims are in, and a slash: it need not be repeated.
fn namespace_of(scenario: &Scenario) -> String {
    let claims = scenario.rounds.iter().flat_map(|round| &round.claims);
    let namespaces: BTreeSet<&str> = claims
        .filter_map(|claim| Some(claim.claim.split_once('/')?.0))
        .collect();
    match namespaces.into_iter().collect::<Vec<_>>().as_slice() {
        [one] => format!("{one}/"),
        _ => String::new(),
    }
}

/// A round, and what its pending claims wait for.
fn of_round(
    round: &Round,
    before: Option<&Round>,
    drawn: bool,
    namespace: &str,
    look: Look,
) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let short = |text: &str| text.strip_prefix(namespace).unwrap_or(text).to_owned();
    if (!drawn || look.wide) && !round.claims.is_empty() {
        lines.extend(
            table(round, short, look.wide)
                .render(2)
                .lines()
                .map(str::to_owned),
        );
    }
    for alike in report::alike(round.claims.iter()) {
        let Some(claim) = alike.first() else { continue };
        match &claim.state {
            State::Pending { .. } => lines.extend(pending(&alike, before, namespace, look)),
            State::Failed { reason } => {
                lines.push(paint::paint(
                    &format!("  {} failed:", short(&claim.claim)),
                    paint::RED,
                    look.colour,
                ));
                lines.extend(
                    reason
                        .lines()
                        .flat_map(|line| wrapped(line, "    ", "      ")),
                );
            }
            State::Prepared { .. } => {}
        }
    }
    if drawn {
        let pictures = pictures(&round.gpus);
        let painted = |line: String| paint::picture(&line.replace(namespace, ""), look.colour);
        lines.extend(pictures.into_iter().map(painted));
    }
    lines.extend(
        round
            .surprises
            .iter()
            .flat_map(|surprise| wrapped(surprise, "  ", "    ")),
    );
    lines
}

/// Draws the GPUs; idle ones that follow each other are one line.
fn pictures(gpus: &[GpuPicture]) -> Vec<String> {
    let mut lines = Vec::new();
    for run in gpus.chunk_by(|one, next| one.is_idle() && next.is_idle()) {
        match run {
            [first, last] => lines.push(format!("{}, {}  idle", first.gpu, last.gpu)),
            [first, .., last] => lines.push(format!("{} … {}  idle", first.gpu, last.gpu)),
            run => lines.extend(run.iter().flat_map(GpuPicture::lines)),
        }
    }
    lines
}

/// Says why claims are pending, all for the same reason: never cut, since the way out is its end.
fn pending(
    alike: &[&ClaimReport],
    before: Option<&Round>,
    namespace: &str,
    look: Look,
) -> Vec<String> {
    let Some(ClaimReport {
        state:
            State::Pending {
                detail,
                cause,
                expected,
                ..
            },
        ..
    }) = alike.first()
    else {
        return Vec::new();
    };
    let short = |text: &str| text.strip_prefix(namespace).unwrap_or(text).to_owned();
    let mut names: Vec<String> = Vec::new();
    for claim in alike {
        let claimed = vec![short(&claim.claim)];
        let users = if claim.pods.is_empty() {
            &claimed
        } else {
            &claim.pods
        };
        for user in users {
            if !names.contains(user) {
                names.push(user.clone());
            }
        }
    }
    let several = names.len() > 1;
    let waits = cause.as_ref().is_some_and(Cause::may_pass);
    let waited = |claim: &&ClaimReport| {
        before.is_some_and(|before| {
            before.claims.iter().any(|other| {
                other.claim == claim.claim && matches!(other.state, State::Pending { .. })
            })
        })
    };
    let still = if alike.iter().all(waited) {
        "still "
    } else {
        ""
    };
    let verb = match (waits, several) {
        (true, false) => format!("{still}waits"),
        (true, true) => format!("{still}wait"),
        (false, false) => format!("is {still}pending"),
        (false, true) => format!("are {still}pending"),
    };
    let as_expected = if *expected { ", as expected" } else { "" };
    let reason = report::reason(alike).replace(namespace, "");
    let text = format!("{} {verb}{as_expected}: {reason}", names.join(", "));
    let mut lines: Vec<String> = wrapped(&text, "  ", "    ")
        .iter()
        .map(|line| paint::paint(line, paint::YELLOW, look.colour))
        .collect();
    if look.wide {
        let detail = detail.replace(namespace, "");
        lines.extend(
            detail
                .lines()
                .flat_map(|line| wrapped(line, "    ", "      ")),
        );
    }
    lines
}

/// The claims, one row a device.
fn table(round: &Round, short: impl Fn(&str) -> String, wide: bool) -> Table {
    let mut table = Table::new(["CLAIM", "USED BY", "GOT"]);
    if wide {
        table.widen(&["REQUEST", "NODES", "MOUNTS", "PREPARE"]);
    }
    for claim in &round.claims {
        let pods = if claim.pods.is_empty() {
            "(no pod)".to_owned()
        } else {
            claim.pods.join(", ")
        };
        let name = short(&claim.claim);
        match &claim.state {
            State::Pending { .. } => table.cells(vec![name, pods, "pending".to_owned()]),
            State::Failed { .. } => table.cells(vec![name, pods, "failed".to_owned()]),
            State::Prepared {
                devices,
                prepare_us,
            } => {
                let spec = cdi::of(claim);
                for (number, device) in devices.iter().enumerate() {
                    let once = |text: String| if number == 0 { text } else { String::new() };
                    let mut cells = vec![once(name.clone()), once(pods.clone()), got(device)];
                    if wide {
                        cells.extend([
                            device.requests.join(", "),
                            spec.as_ref()
                                .map_or("-".to_owned(), |spec| cdi::nodes(spec, &device.cdi_ids)),
                            once(spec.as_ref().map_or(0, cdi::mounts).to_string()),
                            once(format!(
                                "{}.{} ms",
                                prepare_us / 1000,
                                prepare_us % 1000 / 100
                            )),
                        ]);
                    }
                    table.cells(cells);
                }
            }
        }
    }
    table
}

/// The device, with the part of it that a share is.
fn got(device: &DeviceReport) -> String {
    let part = |name: &str, unit: &str| Some(format!("{}{unit}", device.consumed.get(name)?));
    let parts: Vec<String> = [
        part(capacity::PERCENT, " %"),
        device.memory_of_percent.map(divvy_why::device::bytes),
        part(capacity::MEMORY, ""),
        device
            .memory_limit
            .map(|limit| format!("limit {}", divvy_why::device::bytes(limit))),
        part(capacity::CORES, " %"),
    ]
    .into_iter()
    .flatten()
    .collect();
    match parts.as_slice() {
        [] => device.device.clone(),
        parts => format!("{} ({})", device.device, parts.join(", ")),
    }
}

fn summary(report: &Report, look: Look) -> Vec<String> {
    let problems = report.problems();
    let claims = || {
        report
            .scenarios
            .iter()
            .flat_map(|s| &s.rounds)
            .flat_map(|round| &round.claims)
    };
    let names = |wanted: &dyn Fn(&&ClaimReport) -> bool| {
        claims()
            .filter(wanted)
            .map(|claim| &claim.claim)
            .collect::<BTreeSet<_>>()
            .len()
    };
    let skipped = report
        .scenarios
        .iter()
        .filter(|scenario| scenario.skipped.is_some())
        .count();
    let mut counts = vec![
        number(report.scenarios.len() - skipped, "manifest"),
        number(names(&|_| true), "claim"),
    ];
    if skipped > 0 {
        counts.push(format!("{skipped} skipped"));
    }
    let counts = counts.join(", ");
    let mut lines = if problems.is_empty() {
        let waited = names(&|claim| matches!(claim.state, State::Pending { .. }));
        let waited = if waited > 0 {
            format!(" ({waited} waited)")
        } else {
            String::new()
        };
        let outcome = if names(&|_| true) == 0 {
            "nothing asks for a GPU.".to_owned()
        } else {
            format!("all as expected{waited}, all given back, nothing left behind.")
        };
        wrapped(&format!("{counts}: {outcome}"), "", "")
    } else {
        let counts = format!("{counts}, {}.", number(problems.len(), "problem"));
        vec![paint::paint(&counts, paint::RED, look.colour)]
    };
    lines.extend(
        report
            .left_behind
            .iter()
            .map(|what| format!("  left behind: {what}")),
    );
    if !look.all && report.scenarios.len() > 1 {
        lines.push(
            "(--all shows every example in full, --only NAME one of them; more: -o wide)"
                .to_owned(),
        );
    }
    lines
}

fn number(count: usize, what: &str) -> String {
    if count == 1 {
        format!("1 {what}")
    } else {
        format!("{count} {what}s")
    }
}

/// The first lines of a text, and how many more there are.
fn cut(mut lines: Vec<String>, look: Look) -> Vec<String> {
    if !look.wide && lines.len() > SHOWN + 1 {
        let more = lines.len() - SHOWN;
        lines.truncate(SHOWN);
        lines.push(format!("      … {more} more lines (-o wide)"));
    }
    lines
}

/// The text in lines that fit; `first` and `rest` go before them. A word that is longer stays
/// whole.
fn wrapped(text: &str, first: &str, rest: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        let mut line = if lines.is_empty() {
            first.to_owned()
        } else {
            rest.to_owned()
        };
        let mut is_empty = true;
        for word in paragraph.split_whitespace() {
            if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
                lines.push(std::mem::replace(&mut line, rest.to_owned()));
                is_empty = true;
            }
            if !is_empty {
                line.push(' ');
            }
            line.push_str(word);
            is_empty = false;
        }
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests;
