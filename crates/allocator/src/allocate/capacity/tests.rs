use super::*;

fn range(min: &str, max: &str, step: &str) -> CapacityRequestPolicyRange {
    let optional = |text: &str| (!text.is_empty()).then(|| Raw(text.to_owned()));
    CapacityRequestPolicyRange {
        min: Raw(min.to_owned()),
        max: optional(max),
        step: optional(step),
    }
}

fn rounded(range: &CapacityRequestPolicyRange, asked: &str, fractions: bool) -> String {
    let range = Range::read(range, fractions).unwrap();
    match range.round_up(asked.parse().unwrap()) {
        Ok(amount) => format!(
            "{amount}{}",
            if range.allows(&amount) {
                ""
            } else {
                " not allowed"
            }
        ),
        Err(error) => error,
    }
}

#[test]
fn an_amount_is_rounded_up_to_the_next_step_from_the_minimum() {
    for (min, max, step, asked, expected) in [
        ("1Gi", "9Gi", "2Gi", "0", "1Gi"),
        ("1Gi", "9Gi", "2Gi", "1Gi", "1Gi"),
        ("1Gi", "9Gi", "2Gi", "1025Mi", "3Gi"),
        ("1Gi", "9Gi", "2Gi", "9Gi", "9Gi"),
        ("1Gi", "9Gi", "2Gi", "9217Mi", "11Gi not allowed"),
        ("0", "100", "1", "7", "7"),
        ("0", "", "", "12345", "12345"),
        ("0", "10", "", "11", "11 not allowed"),
        ("1Mi", "80Gi", "1Mi", "1", "1Mi"),
        ("1Mi", "80Gi", "1Mi", "1048577", "2Mi"),
    ] {
        assert_eq!(
            rounded(&range(min, max, step), asked, true),
            expected,
            "{min} {max} {step} {asked}"
        );
        assert_eq!(
            rounded(&range(min, max, step), asked, false),
            expected,
            "{min} {max} {step} {asked}"
        );
    }
}

#[test]
fn fractions_are_thousandths_with_the_feature_and_whole_without() {
    let tenths = range("100m", "2", "100m");
    assert_eq!(rounded(&tenths, "250m", true), "300m");
    assert_eq!(rounded(&tenths, "1", true), "1");
    // Without it 100m counts as 1: the step is 1, from 1.
    assert_eq!(rounded(&tenths, "250m", false), "1");
    assert_eq!(rounded(&tenths, "1500m", false), "2");
    assert_eq!(
        rounded(&tenths, "250u", true),
        "100m",
        "less than the minimum is the minimum, however fine"
    );
    assert_eq!(
        rounded(&tenths, "200500u", true),
        "the request 200500u is not representable in the steps of its valid range"
    );
}

#[test]
fn the_default_is_allowed_even_off_the_steps() {
    let policy = CapacityRequestPolicy {
        default: Some(Raw("5".to_owned())),
        valid_range: Some(range("0", "10", "2")),
        valid_values: None,
    };
    assert_eq!(
        breaks(&"5".parse().unwrap(), Some(&policy), true),
        Ok(false)
    );
    assert_eq!(breaks(&"7".parse().unwrap(), Some(&policy), true), Ok(true));
}
