//! `cargo xtask ui`: the page of `divvy demo --ui` in a real browser: what it loads and how fast it
//! paints, names and roles, keyboard, markup in names; and in light, dark and forced colours, at
//! the widths of a desktop and of a phone, whether it fits and can be read.

mod chromium;
mod fleet;
mod looks;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use chromium::{Chromium, at};
use looks::{MEASURE, SCHEMES, WINDOWS, forced_colours, looks, right, screenshots, window};

/// Budgets of the page, which may come through a tunnel to a cluster's machine.
const MAX_BYTES: f64 = 60_000.0;
/// Height at 1280 pixels of 40 nodes of 8 GPUs with claims, and 25 pods that wait.
const MAX_HEIGHT: f64 = 4000.0;
const MAX_REQUESTS: usize = 8;
const MAX_FIRST_PAINT_MS: f64 = 1500.0;

/// When everything of the demo's manifests is to be seen: the last pod waits, and the figures of
/// the last claim are known.
const SCENE: &str = "document.querySelectorAll('.part').length === 15 && \
    document.querySelectorAll('#waiting > li').length === 1 && document.querySelector('.over') !== null";

/// Arguments of `cargo xtask ui`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write screenshots, light and dark, of a desktop and a phone, into this folder
    #[arg(long, value_name = "FOLDER")]
    screenshots: Option<PathBuf>,
}

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let built = Command::new("cargo")
        .args(["build", "--locked", "-p", "divvy"])
        .current_dir(root)
        .status();
    ensure!(
        built.context("running cargo")?.success(),
        "divvy does not build"
    );
    let (demo, url) = demo(root)?;
    let profile = tempfile::tempdir()?;
    let mut browser = Chromium::start(profile.path())?;
    window(&mut browser, WINDOWS[0])?;
    browser.call("Page.navigate", &json!({ "url": url }))?;
    browser.until("location.search === '' && document.querySelectorAll('.part').length > 0")?;
    cost(&mut browser)?;
    browser.until(SCENE)?;
    browser.value(MEASURE)?;
    // The demo goes on; the page stays as it is.
    browser.value("events.close()")?;
    if let Some(folder) = &args.screenshots {
        screenshots(&mut browser, folder)?;
    }
    for size in WINDOWS {
        window(&mut browser, size)?;
        for scheme in SCHEMES {
            looks(&mut browser, size, scheme)?;
        }
    }
    window(&mut browser, WINDOWS[0])?;
    forced_colours(&mut browser)?;
    names_and_roles(&mut browser)?;
    keyboard(&mut browser)?;
    many_nodes(&mut browser)?;
    tenants_text(&mut browser)?;
    let errors: Vec<&Value> = browser
        .events("Log.entryAdded")
        .filter(|e| *at(e, "/entry/level") == "error")
        .collect();
    ensure!(errors.is_empty(), "the browser reports errors: {errors:?}");
    let thrown: Vec<&Value> = browser.events("Runtime.exceptionThrown").collect();
    ensure!(thrown.is_empty(), "the page fails: {thrown:?}");
    demo.interrupt()
}

/// The demo; ends when it is dropped.
struct Demo(Child);

impl Demo {
    /// Interrupts it like Ctrl-C, after which nothing of it is left.
    fn interrupt(mut self) -> Result<()> {
        let process = self.0.id().to_string();
        ensure!(
            Command::new("kill")
                .args(["-INT", &process])
                .status()?
                .success(),
            "the demo has ended"
        );
        let status = self.0.wait()?;
        ensure!(status.success(), "after Ctrl-C the demo ends with {status}");
        Ok(())
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn demo(root: &Path) -> Result<(Demo, String)> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let mut child = Command::new(target.join("debug/divvy"))
        .args([
            "demo",
            "--ui",
            "--sim",
            "h100x7",
            "--sick",
            "4",
            "-f",
            "xtask/src/ui/fleet.yaml",
        ])
        .current_dir(root)
        .env_remove("DISPLAY")
        .env_remove("WAYLAND_DISPLAY")
        .stdout(Stdio::piped())
        .spawn()
        .context("starting divvy")?;
    let output = child.stdout.take().context("no output of divvy")?;
    let demo = Demo(child);
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    let url = line.trim().to_owned();
    ensure!(
        url.starts_with("http://127.0.0.1:"),
        "divvy prints no link: {url:?}"
    );
    Ok((demo, url))
}

/// Bytes and requests until the page stands, and the time to its first paint.
fn cost(browser: &mut Chromium) -> Result<()> {
    let paint = browser
        .value("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1")?;
    let paint = paint.as_f64().context("no time of the first paint")?;
    let nodes = browser.value("document.querySelectorAll('*').length")?;
    let requests: Vec<&str> = browser
        .events("Network.requestWillBeSent")
        .filter_map(|event| at(event, "/request/url").as_str())
        .filter(|url| !url.starts_with("about:"))
        .collect();
    let bytes: f64 = browser
        .events("Network.dataReceived")
        .filter_map(|event| at(event, "/dataLength").as_f64())
        .sum();
    let foreign = requests
        .iter()
        .find(|url| !url.starts_with("http://127.0.0.1:"));
    crate::say(&format!(
        "{} requests, {bytes} bytes, first paint after {paint:.0} ms, {nodes} elements",
        requests.len()
    ));
    ensure!(foreign.is_none(), "the page asks other hosts: {foreign:?}");
    ensure!(
        requests.len() <= MAX_REQUESTS,
        "more than {MAX_REQUESTS} requests: {requests:?}"
    );
    ensure!(
        bytes > 0.0 && bytes <= MAX_BYTES,
        "not between 0 and {MAX_BYTES} bytes"
    );
    ensure!(
        (0.0..=MAX_FIRST_PAINT_MS).contains(&paint),
        "not painted within {MAX_FIRST_PAINT_MS} ms"
    );
    Ok(())
}

/// Checks that every control has a name, and that a screen reader is given the page's headings,
/// lists and table.
fn names_and_roles(browser: &mut Chromium) -> Result<()> {
    let tree = browser.call("Accessibility.getFullAXTree", &json!({}))?;
    let nodes = at(&tree, "/nodes")
        .as_array()
        .context("no accessibility tree")?;
    let text = |node: &Value, place: &str| at(node, place).as_str().unwrap_or_default().to_owned();
    let all: Vec<(String, String)> = nodes
        .iter()
        .filter(|node| *at(node, "/ignored") != true)
        .map(|node| (text(node, "/role/value"), text(node, "/name/value")))
        .collect();
    let unnamed = all.iter().find(|(role, name)| {
        ["button", "link", "heading", "region", "table"].contains(&role.as_str()) && name.is_empty()
    });
    ensure!(
        unnamed.is_none(),
        "without a name for screen readers: {unnamed:?}"
    );
    for (role, name) in [
        ("heading", "GPUs of demo, in one process"),
        ("heading", "Free now"),
        ("heading", "Nodes"),
        ("region", "Node demo-node"),
        ("list", "GPUs of demo-node"),
        ("columnheader", "Claim"),
        ("status", ""),
    ] {
        ensure!(
            all.iter()
                .any(|(r, n)| r == role && (name.is_empty() || n == name)),
            "no {role} {name:?}"
        );
    }
    let holder = |(role, name): &&(String, String)| {
        role == "button" && name.starts_with("claim ") && name.contains("memory granted")
    };
    ensure!(
        all.iter().any(|node| holder(&node)),
        "no claim is described"
    );
    Ok(())
}

/// Goes from the top of the page to a claim, to the report of `divvy status`, and back, with keys
/// alone.
fn keyboard(browser: &mut Chromium) -> Result<()> {
    browser.value("document.activeElement.blur()")?;
    let focused = "document.activeElement?.classList.contains('part')";
    for _ in 0..40 {
        browser.press("Tab", 9, "")?;
        if browser.value(focused)? == json!(true) {
            break;
        }
    }
    ensure!(
        browser.value(focused)? == json!(true),
        "the Tab key does not lead to a claim"
    );
    let outline = browser.value("getComputedStyle(document.activeElement).outlineStyle")?;
    ensure!(outline != json!("none"), "the focus cannot be seen");
    browser.press("Enter", 13, "\r")?;
    browser.until("document.getElementById('about').open")?;
    let said = browser.value("document.getElementById('about-text').textContent")?;
    ensure!(
        said.as_str().is_some_and(|said| said.starts_with("claim ")),
        "it says {said}"
    );
    browser.press("Escape", 27, "")?;
    browser.until("!document.getElementById('about').open")?;
    ensure!(
        browser.value(focused)? == json!(true),
        "the focus does not come back from the report to the claim"
    );
    Ok(())
}

/// Checks a fleet: many nodes are rows of cells, which are one stop of the Tab key; pods that wait
/// for one reason are one card; the filter has a key, and is that of the whole page.
fn many_nodes(browser: &mut Chromium) -> Result<()> {
    let view = fleet::view();
    let seen = "JSON.stringify(['.cell', '.gpu', '#waiting > li', '#holders > tr'].map((it) => document.querySelectorAll(it).length))";
    let now = browser.value(&format!("draw({view}), {seen}"))?;
    ensure!(
        now == json!("[320,8,2,20]"),
        "40 nodes of 8 GPUs show as {now}: cells, rows of the open node, reasons of 25 waiting pods, and rows of holders"
    );
    let colours = "new Set([...document.querySelectorAll('.held')].map((it) => getComputedStyle(it).backgroundColor)).size";
    let colours = browser.value(colours)?;
    ensure!(
        colours == json!(fleet::MODES.len()),
        "{colours} colours of cells for {} modes with claims",
        fleet::MODES.len()
    );
    let heights =
        "new Set([...document.querySelectorAll('.held')].map((it) => it.style.height)).size";
    let heights = browser.value(heights)?;
    ensure!(
        heights.as_f64().is_some_and(|heights| heights >= 3.0),
        "cells are filled to {heights} heights"
    );
    let height = browser.value("document.documentElement.scrollHeight")?;
    crate::say(&format!(
        "40 nodes of 8 GPUs, 25 waiting pods: {height} pixels high"
    ));
    ensure!(
        height.as_f64().is_some_and(|height| height <= MAX_HEIGHT),
        "the fleet is {height} pixels high"
    );
    let above = "document.getElementById('troubles').getBoundingClientRect().top";
    let above = browser.value(&format!(
        "{above} < document.getElementById('nodes').getBoundingClientRect().top"
    ))?;
    ensure!(above == json!(true), "what needs action is below the nodes");
    for size in WINDOWS {
        window(browser, size)?;
        right(browser, "fits", "40 nodes")?;
        right(browser, "contrast", "40 nodes")?;
    }
    window(browser, WINDOWS[0])?;
    let stops = browser.value("document.querySelectorAll('.heat [tabindex=\"0\"]').length")?;
    ensure!(
        stops == json!(1),
        "the Tab key stops {stops} times among the nodes"
    );
    browser.value("document.querySelector('.heat [tabindex=\"0\"]').focus()")?;
    browser.press("ArrowRight", 39, "")?;
    browser.press("ArrowDown", 40, "")?;
    let focused = browser.value("document.activeElement.dataset.key")?;
    ensure!(
        focused == json!("cell gpu/node-1.example.com/gpu-0"),
        "right and down lead to {focused}"
    );
    browser.value("document.activeElement.blur()")?;
    browser.press("/", 191, "/")?;
    let focused = browser.value("document.activeElement.id")?;
    ensure!(
        focused == json!("filter-text"),
        "the key / leads to {focused}"
    );
    let filter = |text: &str| {
        format!(
            "document.getElementById('filter-text').value = '{text}', \
             document.getElementById('filter').dispatchEvent(new Event('input')), {seen}"
        )
    };
    let left = browser.value(&filter("node-12."))?;
    // More claims than the table shows at first.
    ensure!(left == json!("[0,8,0,20]"), "the filter leaves {left}");
    let left = browser.value(&filter("job-12-3-"))?;
    ensure!(left == json!("[0,1,0,4]"), "the filter leaves {left}");
    let left = browser.value(&filter("waits-3"))?;
    ensure!(left == json!("[0,0,1,0]"), "the filter leaves {left}");
    let address = browser.value("location.hash")?;
    ensure!(address == json!("#q=waits-3"), "the address has {address}");
    browser.value(&filter(""))?;
    Ok(())
}

/// Checks that names written by a tenant stay text, wherever they are shown.
fn tenants_text(browser: &mut Chromium) -> Result<()> {
    const EVIL: &str = "<img src=x onerror=\"window.owned=1\"><script>window.owned=1</script>";
    let hold = json!({
        "namespace": EVIL, "claim": EVIL, "pods": [EVIL], "device": EVIL, "part": EVIL, "place": [0, 1], "phase": EVIL,
        "memoryGranted": 9, "memoryUsed": null, "utilization": null, "idleSeconds": null, "overGrant": null, "wasted": null, "idle": false,
    });
    let gpu = json!({
        "name": EVIL, "uuid": EVIL, "product": EVIL, "mode": "whole", "troubles": [EVIL], "memory": null,
        "memoryUsed": null, "memoryUnattributed": null, "holds": [hold],
    });
    let view = json!({
        "now": EVIL, "caption": EVIL, "free": null, "unread": [EVIL],
        "nodes": [{ "name": EVIL, "free": 0, "trouble": EVIL, "driver": EVIL, "gpus": [gpu] }],
        "troubles": [{ "node": EVIL, "kind": EVIL, "gpu": EVIL, "why": EVIL, "remedy": EVIL, "since": EVIL, "affects": [EVIL] }],
        "refused": [{ "claim": EVIL, "pods": [EVIL], "reason": EVIL, "message": EVIL, "since": EVIL }],
        "waiting": [{ "pod": EVIL, "claims": [EVIL], "since": EVIL, "verdict": EVIL, "mistake": EVIL, "hint": EVIL,
                      "nodes": [{ "nodes": [EVIL], "reasons": [EVIL] }] }],
    });
    let before = browser.value("document.scripts.length")?;
    browser.value(&format!("draw({view})"))?;
    let found = browser.value(
        "JSON.stringify([document.images.length, document.scripts.length, window.owned ?? null, \
         document.body.textContent.split('onerror').length - 1])",
    )?;
    let found: Value = serde_json::from_str(found.as_str().unwrap_or_default())?;
    let shown = at(&found, "/3").as_u64().unwrap_or(0);
    let nothing =
        *at(&found, "/0") == 0 && *at(&found, "/1") == before && at(&found, "/2").is_null();
    ensure!(nothing, "markup in names has an effect: {found}");
    ensure!(shown > 20, "only {shown} of the names are shown");
    // An administrator runs what a button copies.
    let planted = "JSON.stringify([...document.querySelectorAll('[data-copy]')].map((it) => it.dataset.copy).filter((it) => it.includes('planted')))";
    let refused = json!({ "claim": "a/b", "pods": [], "reason": "x", "message": "kubectl planted", "since": EVIL });
    let waits = json!({ "pod": "a/b", "claims": [], "verdict": "x", "cause": "kubectl planted", "hint": "kubectl planted", "nodes": [] });
    let view = json!({ "now": EVIL, "free": null, "unread": [], "nodes": [], "troubles": [], "refused": [refused], "waiting": [waits] });
    let found = browser.value(&format!("draw({view}), {planted}"))?;
    ensure!(
        found == json!("[]"),
        "words of a tenant can be copied: {found}"
    );
    Ok(())
}
