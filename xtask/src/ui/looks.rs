//! The looks of the page: in windows of a desktop and of a phone, in light, dark and forced
//! colours.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};

use super::chromium::{Chromium, at};

/// Windows in which the page is measured: name in a screenshot's file, width, height.
pub(super) const WINDOWS: [(&str, u32, u32); 2] = [("", 1280, 1180), ("-390", 390, 844)];
pub(super) const SCHEMES: [&str; 2] = ["light", "dark"];
/// Defines `measure`.
pub(super) const MEASURE: &str = include_str!("measure.js");
/// Most steps with the Tab key; the page of the demo has fewer places.
const MAX_TABS: usize = 120;

pub(super) fn window(browser: &mut Chromium, (_, width, height): (&str, u32, u32)) -> Result<()> {
    let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
    browser
        .call("Emulation.setDeviceMetricsOverride", &size)
        .map(drop)
}

fn media(browser: &mut Chromium, features: &[(&str, &str)]) -> Result<()> {
    let features: Vec<Value> = features
        .iter()
        .map(|(name, value)| json!({ "name": name, "value": value }))
        .collect();
    browser
        .call(
            "Emulation.setEmulatedMedia",
            &json!({ "features": features }),
        )
        .map(drop)
}

/// Measures the page in a window and a scheme: texts can be read, nothing is wider than the window,
/// controls can be met, and the Tab key shows where it is.
pub(super) fn looks(
    browser: &mut Chromium,
    (_, width, _): (&str, u32, u32),
    scheme: &str,
) -> Result<()> {
    media(browser, &[("prefers-color-scheme", scheme)])?;
    let place = format!("{width} pixels, {scheme}");
    let contrast = right(browser, "contrast", &place)?;
    right(browser, "fits", &place)?;
    let places = focus_is_seen(browser, &place)?;
    let report = "document.querySelector('.part').click()";
    browser.value(report)?;
    browser.until("document.getElementById('about').open")?;
    right(browser, "contrast", &place)?;
    right(browser, "fits", &place)?;
    browser.value("document.getElementById('about').close()")?;
    crate::say(&format!(
        "{place}: least contrast of texts {}:1, {places} places for the focus",
        at(&contrast, "/least")
    ));
    Ok(())
}

/// Returns what a function of `measure.js` found; what is wrong is an error.
pub(super) fn right(browser: &mut Chromium, function: &str, place: &str) -> Result<Value> {
    let found = browser.value(&format!("measure.{function}()"))?;
    let wrong = at(&found, "/wrong");
    ensure!(*wrong == json!([]), "{place}, {function}: {wrong}");
    Ok(found)
}

/// Takes pictures of the window and, with `-all` in their names, of the page to its end.
pub(super) fn screenshots(browser: &mut Chromium, folder: &Path) -> Result<()> {
    fs_err::create_dir_all(folder)?;
    for size in WINDOWS {
        window(browser, size)?;
        for scheme in SCHEMES {
            media(browser, &[("prefers-color-scheme", scheme)])?;
            let name = format!("ui-{scheme}{}", size.0);
            picture(browser, &folder.join(format!("{name}.png")), &json!({}))?;
            let height = browser.value("document.documentElement.scrollHeight")?;
            let all = json!({ "x": 0, "y": 0, "width": size.1, "height": height, "scale": 1 });
            let all = json!({ "captureBeyondViewport": true, "clip": all });
            picture(browser, &folder.join(format!("{name}-all.png")), &all)?;
        }
    }
    Ok(())
}

fn picture(browser: &mut Chromium, path: &Path, options: &Value) -> Result<()> {
    let taken = browser.call("Page.captureScreenshot", options)?;
    let data = at(&taken, "/data").as_str().context("no picture")?;
    fs_err::write(path, BASE64_STANDARD.decode(data)?)?;
    let bytes = fs_err::metadata(path)?.len();
    crate::say(&format!("{}: {bytes} bytes", path.display()));
    Ok(())
}

/// Goes through the page with the Tab key; returns the number of places, at each of which the focus
/// was seen.
fn focus_is_seen(browser: &mut Chromium, place: &str) -> Result<usize> {
    // A focus that a script sets has no ring, so the first place is only where the keys begin.
    browser.value("document.querySelector('nav a').focus()")?;
    let mut places = 1;
    while places < MAX_TABS {
        browser.press("Tab", 9, "")?;
        let found = right(browser, "focus", place)?;
        if *at(&found, "/what") == "body" {
            break;
        }
        places += 1;
    }
    ensure!(
        (10..MAX_TABS).contains(&places),
        "{place}: the Tab key stops at {places} places"
    );
    Ok(places)
}

/// Checks that lines and words stand for what colours show, where the user has own colours.
pub(super) fn forced_colours(browser: &mut Chromium) -> Result<()> {
    media(browser, &[("forced-colors", "active")])?;
    let wrong = browser.value(
        "JSON.stringify([...document.querySelectorAll('.part, .bar, .key')].filter((it) => \
         it.checkVisibility() && getComputedStyle(it).borderTopStyle === 'none').map((it) => it.className))",
    )?;
    ensure!(wrong == json!("[]"), "forced colours: no border: {wrong}");
    let modes = browser.value("document.querySelector('#legend .mode').checkVisibility()")?;
    ensure!(
        modes == json!(false),
        "forced colours: the legend names colours that no bar has"
    );
    let words = browser.value("document.querySelector('.gpu strong').textContent")?;
    ensure!(
        words.as_str().is_some_and(|words| words.contains(" · ")),
        "the mode is not in words: {words}"
    );
    right(browser, "contrast", "forced colours")?;
    right(browser, "fits", "forced colours")?;
    media(browser, &[])
}
