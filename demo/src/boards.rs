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
            // `rtx-pro-6000` ends in digits, too, but has no count behind an x.
            let (model, count) = match part.to_lowercase().rsplit_once('x') {
                Some((model, count)) if count.parse::<usize>().is_ok() => {
                    (model.to_owned(), count.to_owned())
                }
                _ => (part.to_lowercase(), "1".to_owned()),
            };
            Ok(named(model.trim())?.map(|key| format!("{key}x{count}")))
        })
        .collect::<Result<Option<_>, String>>()?
        .unwrap_or_default();
    let known = parts.join(",");
    match SimNode::parse(&known) {
        Ok(_) if !known.is_empty() => Ok(known),
        // Clap shows one line, whatever of the error's causes.
        _ => Err(error.to_string()),
    }
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
