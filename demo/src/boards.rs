//! Names of boards as people write them: in any case, by a part of the product's name, and without
//! a count. Pure.

use divvy_gpu_sim::{SimNode, profiles};

/// The argument of `--sim` as the simulation reads it, such as `h100x2,l4x1`.
pub(crate) fn simulated(text: &str) -> Result<String, String> {
    // The known names are tried first, so that the simulation's own errors are shown for them.
    let Err(error) = SimNode::parse(text) else {
        return Ok(text.to_owned());
    };
    let parts: Vec<String> = text
        .split(',')
        .map(|part| {
            let part = part.trim();
            let (model, count) = counted(&part.to_lowercase());
            if let Some(turned) = turned(part) {
                return Err(format!("{part:?}: the count comes last: write {turned}"));
            }
            Ok(named(model.trim())?.map(|key| format!("{key}x{count}")))
        })
        .collect::<Result<Option<_>, String>>()?
        .unwrap_or_default();
    let known = parts.join(",");
    match SimNode::parse(&known) {
        Ok(_) if !known.is_empty() => Ok(known),
        // Clap shows one line, whatever of the error's causes.
        _ => Err(match text.split(',').find_map(alike) {
            Some((part, near)) => {
                format!("{part:?} is no board that is simulated: the nearest is {near}")
            }
            None => error.to_string(),
        }),
    }
}

/// Splits a name in lower case from its count, which is 1 without any.
fn counted(part: &str) -> (String, String) {
    // `rtx-pro-6000` ends in digits, too, but has no count behind an x.
    match part.rsplit_once('x') {
        Some((model, count)) if count.parse::<usize>().is_ok_and(|n| n < 1000) => {
            (model.to_owned(), count.to_owned())
        }
        _ => (part.to_owned(), "1".to_owned()),
    }
}

/// Returns `8xh100` as `h100x8`.
fn turned(part: &str) -> Option<String> {
    let part = part.to_lowercase();
    let (count, model) = part.split_once('x')?;
    let count = count.trim().parse::<usize>().ok()?;
    let board = named(model.trim()).ok()??;
    Some(format!("{board}x{count}"))
}

/// Boards of consumers, which are not simulated, and one of the same architecture without MIG that
/// is: its name begins so.
const CONSUMERS: [(&str, &str); 6] = [
    ("rtx50", "rtx-pro-6000"),
    ("rtx40", "l40s"),
    ("rtx30", "a10"),
    ("rtx20", "t4"),
    ("gtx16", "t4"),
    ("titan", "v100-16"),
];

/// Returns a part that names a board that is not simulated, and the board that is nearest.
fn alike(part: &str) -> Option<(&str, String)> {
    let (model, count) = counted(&part.trim().to_lowercase());
    // Of a board that is known, only the count can be wrong.
    if divvy_gpu_sim::profile(&model).is_some() {
        return None;
    }
    let plain: String = model.chars().filter(char::is_ascii_alphanumeric).collect();
    let plain = plain.strip_prefix("nvidia").unwrap_or(&plain);
    let plain = plain.strip_prefix("geforce").unwrap_or(plain);
    let consumer = CONSUMERS.iter().find(|(start, _)| plain.starts_with(start));
    let near = consumer.map(|(_, near)| *near);
    let keys = || profiles().iter().map(|board| board.key);
    let near = near
        .filter(|near| keys().any(|key| key == *near))
        .or_else(|| divvy_why::spelling::nearest(&model, keys()).filter(|near| *near != model))?;
    Some((part.trim(), format!("{near}x{count}")))
}

/// Returns the board that is called so, if there is one; an error where there are several.
fn named(model: &str) -> Result<Option<&'static str>, String> {
    let plain = |text: &str| text.to_lowercase().replace([' ', '_'], "-");
    let wanted = plain(model);
    let wanted = wanted.strip_prefix("nvidia-").unwrap_or(&wanted);
    if wanted.is_empty() {
        return Ok(None);
    }
    if let Some(exact) = divvy_gpu_sim::profile(wanted) {
        return Ok(Some(exact.key));
    }
    let begins = |text: &str| {
        text.strip_prefix(wanted)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    let found: Vec<&str> = profiles()
        .iter()
        .filter(|board| {
            let product = plain(board.product_name);
            begins(board.key) || begins(product.strip_prefix("nvidia-").unwrap_or(&product))
        })
        .map(|board| board.key)
        .collect();
    match found.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        several => Err(format!(
            "{model:?} is one of several boards: write {}",
            several.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boards_are_known_in_any_case_and_by_parts_of_their_names() {
        for (text, expected) in [
            ("h100x2", "h100x2"),
            ("H100", "h100x1"),
            ("H100X2, L4", "h100x2,l4x1"),
            ("A100-80x4", "a100-80x4"),
            ("NVIDIA L40S", "l40sx1"),
            ("a100-sxm4-80gb", "a100-80x1"),
            ("rtx-pro-5000", "rtx-pro-5000"),
            ("none", "none"),
        ] {
            assert_eq!(simulated(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn a_name_of_several_boards_lists_them() {
        let error = simulated("a100x2").unwrap_err();
        assert_eq!(
            error,
            "\"a100\" is one of several boards: write a100-40, a100-80, a100-pcie-40, a100-pcie-80"
        );
        for (text, expected) in [
            ("8xh100", "the count comes last: write h100x8"),
            ("4xA100-80", "the count comes last: write a100-80x4"),
            ("rtx4090", "the nearest is l40sx1"),
            ("GeForce RTX 3090x2", "the nearest is a10x2"),
            ("h1000x2", "the nearest is h100x2"),
        ] {
            let error = simulated(text).unwrap_err();
            assert!(error.ends_with(expected), "{text}: {error}");
        }
        assert!(
            simulated("nothing")
                .unwrap_err()
                .contains("known models: a10")
        );
        assert!(
            simulated("h100x99")
                .unwrap_err()
                .contains("99 simulated GPUs are too many")
        );
    }
}
