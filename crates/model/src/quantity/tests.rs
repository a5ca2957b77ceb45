use super::*;
use proptest::prelude::*;

fn q(text: &str) -> Quantity {
    text.parse().unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn every_suffix_has_its_value_and_canonical_form() {
    for (text, nanos, canonical) in [
        ("0", 0, "0"),
        ("0Gi", 0, "0"),
        ("1n", 1, "1n"),
        ("1u", 1_000, "1u"),
        ("1m", 1_000_000, "1m"),
        ("1", ONE, "1"),
        ("1k", 1_000 * ONE, "1k"),
        ("1M", 1_000_000 * ONE, "1M"),
        ("1G", ONE * ONE, "1G"),
        ("1T", 1_000 * ONE * ONE, "1T"),
        ("1P", 1_000_000 * ONE * ONE, "1P"),
        ("1E", ONE * ONE * ONE, "1E"),
        ("1Ki", 1024 * ONE, "1Ki"),
        ("1Mi", (1 << 20) * ONE, "1Mi"),
        ("1Gi", (1 << 30) * ONE, "1Gi"),
        ("1Ti", (1 << 40) * ONE, "1Ti"),
        ("1Pi", (1 << 50) * ONE, "1Pi"),
        ("1Ei", (1 << 60) * ONE, "1Ei"),
        ("1e3", 1_000 * ONE, "1e3"),
        ("1E3", 1_000 * ONE, "1e3"),
        ("5e-3", 5_000_000, "5e-3"),
        ("12e1", 120 * ONE, "120"),
        ("-1.5Gi", -(3 << 29) * ONE, "-1536Mi"),
        ("+2", 2 * ONE, "2"),
        (".5", ONE / 2, "500m"),
        ("5.", 5 * ONE, "5"),
        ("1.50", 3 * ONE / 2, "1500m"),
        ("16Ei", (1 << 64) * ONE, "16Ei"),
        ("-2048Ki", -(1 << 21) * ONE, "-2Mi"),
        ("1024Mi", (1 << 30) * ONE, "1Gi"),
        ("1000k", 1_000_000 * ONE, "1M"),
        ("1500", 1500 * ONE, "1500"),
        ("0.5Ki", 512 * ONE, "512"),
        ("0.1Ki", 1024 * ONE / 10, "102400m"),
        ("1.1Ki", 11_264 * ONE / 10, "1126400m"),
        ("81559Mi", 81_559 * (1 << 20) * ONE, "81559Mi"),
        ("0.0001u", 1, "1n"),
        ("-0.1n", -1, "-1n"),
        ("0.00000000000000000000000000000000001", 1, "1n"),
        ("1e-400", 1, "1e-9"),
        ("0e999999", 0, "0"),
        (
            "9223372036854775807",
            i128::from(i64::MAX) * ONE,
            "9223372036854775807",
        ),
    ] {
        let got = q(text);
        assert_eq!(
            (got.nanos(), got.to_string().as_str()),
            (nanos, canonical),
            "{text}"
        );
    }
}

/// However far behind the point: a suffix may make whole units of it, and the rest rounds up once.
#[test]
fn each_digit_of_a_long_fraction_counts() {
    for (text, nanos) in [
        ("0.50000000000000000000000000001Ki", 512 * ONE + 1),
        ("0.000000000000000000009Ei", 10_376_294),
        ("0.000000000000000000009E", 9_000_000),
        ("0.0000000000000000000000000009765625Ki", 1),
        ("0.0009765625000000000000000000000000Ki", ONE),
        ("1.00000000000000000000000000001n", 2),
        ("-1.0000000000000000000001", -ONE - 1),
        (
            "10000000000000000000000000000000000000000000e-40",
            1000 * ONE,
        ),
    ] {
        assert_eq!(q(text).nanos(), nanos, "{text}");
    }
}

#[test]
fn what_is_no_number_or_too_large_is_refused() {
    for text in [
        "", ".", "-", "Gi", "1 Gi", "1gi", "1Kib", "1e", "1e+", "1ee3", "1.2.3", "0x10", "1K", "١",
    ] {
        assert_eq!(
            text.parse::<Quantity>(),
            Err(QuantityError::Format(text.to_owned())),
            "{text}"
        );
    }
    for text in [
        "1e30",
        "1e99999999999",
        "340282366920938463463374607431768211456",
        "1000000000000Ei",
    ] {
        assert_eq!(
            text.parse::<Quantity>(),
            Err(QuantityError::Range(text.to_owned())),
            "{text}"
        );
    }
}

#[test]
fn order_and_equality_are_of_the_amount() {
    assert_eq!(q("1Gi"), q("1024Mi"));
    assert_eq!(q("1000m"), q("1"));
    assert!(q("1G") < q("1Gi"));
    assert!(q("-1") < q("1n"));
    assert!(q("0.1") > q("99m"));
}

#[test]
fn arithmetic_is_exact_and_keeps_the_left_format() {
    assert_eq!(
        q("1Gi").checked_sub(&q("1")).map(|v| v.to_string()),
        Some("1073741823".to_owned())
    );
    assert_eq!(
        q("1Gi").checked_add(&q("1024Mi")).map(|v| v.to_string()),
        Some("2Gi".to_owned())
    );
    assert_eq!(
        q("1").checked_add(&q("1n")).map(|v| v.to_string()),
        Some("1000000001n".to_owned())
    );
    assert_eq!(q("100m").to_i64(), None);
    assert_eq!(q("2k").to_i64(), Some(2000));
    assert_eq!(
        (q("2Gi").to_u64(), q("-1").to_u64(), q("0.5").to_u64()),
        (Some(2 << 30), None, None)
    );
    assert_eq!(
        Quantity::from_units(u64::MAX, Format::BinarySi).to_u64(),
        Some(u64::MAX)
    );
    assert_eq!((q("100m").rounded_up(), q("-100m").rounded_up()), (1, -1));
    assert!((q("1500m").to_f64() - 1.5).abs() < f64::EPSILON);
}

/// Amounts of every magnitude, as text in each of the formats.
fn any_text() -> impl Strategy<Value = String> {
    let suffix = prop::sample::select(vec![
        "n", "u", "m", "", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "e3", "E-2",
        "e9",
    ]);
    (
        any::<bool>(),
        0_u64..1 << 30,
        prop::option::of(0_u32..1_000_000),
        suffix,
    )
        .prop_map(|(negative, whole, fraction, suffix)| {
            let fraction = fraction.map(|f| format!(".{f:06}")).unwrap_or_default();
            format!(
                "{}{whole}{fraction}{suffix}",
                if negative { "-" } else { "" }
            )
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_canonical_form_reads_back_as_the_same_amount(text in any_text()) {
        let first = q(&text);
        let second = q(&first.to_string());
        prop_assert_eq!(&first, &second);
        prop_assert_eq!(first.to_string(), second.to_string());
    }

    #[test]
    fn adding_and_taking_away_gives_the_start(a in any_text(), b in any_text()) {
        let (a, b) = (q(&a), q(&b));
        let there = a.checked_add(&b).unwrap();
        prop_assert_eq!(&there.checked_sub(&b).unwrap(), &a);
        prop_assert_eq!(there.cmp(&a), b.nanos().cmp(&0));
    }
}
