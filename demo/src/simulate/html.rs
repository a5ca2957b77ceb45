//! The answer as a page: the GPUs over time, beside the figures. It needs no other file.

use anyhow::Result;
use divvy_fleet::Picture;
use serde::Serialize;

use super::{Answer, text};

/// Page around the data.
const PAGE: &str = include_str!("page.html");
/// Marks in the page.
const DATA: &str = "/*DATA*/";
const TABLE: &str = "<!--TABLE-->";

/// A run of the page.
#[derive(Debug, Serialize)]
struct Run<'a> {
    name: &'a str,
    #[serde(flatten)]
    picture: &'a Picture,
}

pub(super) fn page(answer: &Answer) -> Result<String> {
    let runs = answer.runs.iter().filter_map(|run| {
        let name = run.name.as_str();
        Some(Run {
            name,
            picture: run.picture.as_ref()?,
        })
    });
    let runs: Vec<Run<'_>> = runs.collect();
    // Names of users are in it: nothing in a string ends the script.
    let data = serde_json::to_string(&runs)?.replace('<', "\\u003c");
    // Marks are looked for in the page alone: what fills them may have their text, too.
    let (head, rest) = PAGE.split_once(TABLE).unwrap_or((PAGE, ""));
    let (middle, tail) = rest.split_once(DATA).unwrap_or((rest, ""));
    let table = escaped(&text::table(answer));
    Ok(format!("{head}{table}{middle}{data}{tail}"))
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;")
}
