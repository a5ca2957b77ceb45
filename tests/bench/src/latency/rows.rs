//! The table of what was measured, with its budgets.

use std::time::Duration;

use super::{Shape, Times};
use crate::stats::Samples;
use crate::table::{Budget, Row, Value};

/// A GET of a claim from a real API server on this kind of machine, over TLS.
const REAL_GET: Duration = Duration::from_micros(950);

pub(super) fn rows(
    shapes: &[(Shape, Times)],
    empty: &Samples,
    hand_overs: &Samples,
    real: bool,
) -> Vec<Row> {
    let mut rows = Vec::new();
    let one = shapes
        .iter()
        .find(|(shape, _)| *shape == Shape::OneCall(1))
        .map(|(_, times)| times);
    if let Some(one) = one {
        rows.push(Row::new(
            format!("bare GET of a claim, p50 of {}", one.get.len()),
            one.get.p50(),
        ));
        rows.push(Row::new(
            "bare write, fsync, rename, fsync of the folder, p50",
            one.write.p50(),
        ));
        rows.push(Row::new(
            "bare gRPC call (prepare of no claim), p50",
            empty.p50(),
        ));
    }
    for (shape, times) in shapes {
        let name = shape.name();
        rows.push(times.switches_row(&name));
        let reference = match shape.claims() {
            1 => "GET + write".to_owned(),
            n => format!("{n} GETs at once + {n} writes at once"),
        };
        let prepare = |what: &str, measured: Duration| {
            Row::new(format!("prepare, {name}, {what}"), measured)
                .beside(&reference, times.reference.p50())
        };
        let (p50, p99) = (
            prepare("p50", times.prepare.p50()),
            prepare("p99", times.prepare.p99()),
        );
        match shape {
            Shape::OneCall(1) => {
                rows.push(
                    p50.budget(Budget::Times(1.5))
                        .theirs("3.65 ms = 3.8 ×; 199 ms at its default limit"),
                );
                rows.push(p99.budget(Budget::Times(3.0)));
                let floor = times.reference.p50() + empty.p50();
                let row = Row::new(format!("prepare, {name}, p50"), times.prepare.p50());
                rows.push(row.beside(
                    "GET + write + bare gRPC call: no prepare can be faster",
                    floor,
                ));
                if real {
                    rows.extend(unprepare_rows(*shape, times));
                    continue;
                }
                // The fake API server answers several times faster than a real one, so that the
                // ratio above is stricter than what the budget was made for.
                let own = times.prepare.p50().saturating_sub(times.reference.p50());
                let leaves = (REAL_GET + times.write.p50()).as_secs_f64() * 0.5;
                let row = Row::new("the plugin's own part: prepare − (GET + write), p50", own);
                let row = row.beside(
                    "GET of a real API server + write",
                    REAL_GET + times.write.p50(),
                );
                rows.push(row.budget(Budget::AtMost(Value::Seconds(leaves))));
            }
            Shape::OneCall(8) => {
                rows.push(p50);
                let one = one.map(|one| one.prepare.p50()).unwrap_or_default();
                let row = Row::new(format!("prepare, {name}, p50"), times.prepare.p50());
                let row = row.beside("one claim", one).budget(Budget::Times(3.0));
                rows.push(row.theirs("42 ms = 11.6 ×; 1.6 s at its default limit"));
                rows.push(p99);
            }
            Shape::OneCall(_) | Shape::AtOnce(_) => rows.extend([p50, p99]),
        }
        rows.extend(unprepare_rows(*shape, times));
    }
    if let (Some(one), false) = (one, real) {
        let both = one.prepare.p50() + one.unprepare.p50();
        for (what, measured) in [("p50", hand_overs.p50()), ("p99", hand_overs.p99())] {
            let row = Row::new(
                format!("hand-over: unprepare sent to waiting prepare answered, {what}"),
                measured,
            );
            let row = row.beside("unprepare + prepare", both);
            rows.push(row.theirs("60–90 s: its prepare fails, the kubelet comes again"));
        }
    }
    rows
}

fn unprepare_rows(shape: Shape, times: &Times) -> [Row; 2] {
    let removal = match shape.claims() {
        1 => "bare unlink, fsync of the folder".to_owned(),
        n => format!("{n} of them at once"),
    };
    [
        ("p50", times.unprepare.p50()),
        ("p99", times.unprepare.p99()),
    ]
    .map(|(what, measured)| {
        let row = Row::new(format!("unprepare, {}, {what}", shape.name()), measured);
        row.beside(&removal, times.remove.p50())
    })
}
