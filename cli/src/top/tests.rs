//! The tables over the made-up fleet of the view.

use super::{By, Total, render, top};
use crate::usage::Usage;
use crate::view::tests::{usage, with_shared_partition, world};

const ALL: [(By, &str); 4] = [
    (By::Claims, "claims"),
    (By::Gpus, "gpus"),
    (By::Nodes, "nodes"),
    (By::Namespaces, "namespaces"),
];

#[test]
fn tables_begin_with_what_is_wasted() {
    let view = crate::view::of(&world(), &usage());
    for (by, name) in ALL {
        crate::golden::same(
            &format!("top/{name}.txt"),
            &render(&top(&view, by, None), false),
        );
    }
    crate::golden::same(
        "top/claims-wide.txt",
        &render(&top(&view, By::Claims, None), true),
    );
    crate::golden::same(
        "top/gpus-wide.txt",
        &render(&top(&view, By::Gpus, None), true),
    );
}

#[test]
fn without_the_right_to_list_claims_nothing_is_shown_as_zero() {
    let mut snapshot = world();
    snapshot.claims.clear();
    snapshot
        .unread
        .push("ResourceClaims cannot be listed".to_owned());
    let mut view = crate::view::of(&snapshot, &usage());
    for node in &mut view.nodes {
        node.gpus.iter_mut().for_each(|gpu| gpu.holds.clear());
    }
    for (by, name) in ALL {
        let top = top(&view, by, None);
        assert!(!top.holds_known);
        let text = render(&top, false);
        assert!(!text.contains("no claim holds a GPU"), "{text}");
        match by {
            By::Claims | By::Namespaces => {
                assert!(text.starts_with("unknown which claims hold GPUs"), "{text}");
            }
            By::Gpus | By::Nodes => crate::golden::same(&format!("top/{name}-unread.txt"), &text),
        }
    }
}

#[test]
fn what_cannot_be_read_is_a_question_mark_with_its_reason_and_never_0() {
    let mut usage = Usage::default();
    usage
        .unread
        .push("the node plugins cannot be found".to_owned());
    let view = crate::view::of(&world(), &usage);
    for (by, name) in ALL {
        let text = render(&top(&view, by, None), false);
        assert!(
            text.ends_with("unknown:\n  the node plugins cannot be found"),
            "{text}"
        );
        crate::golden::same(&format!("top/{name}-unknown.txt"), &text);
    }
    let json = serde_json::to_value(top(&view, By::Claims, None)).unwrap();
    assert!(
        json["claims"][0]["memoryUsed"].is_null() && json["claims"][0]["wasted"].is_null(),
        "{json}"
    );
}

/// Claims that share a partition are rows like others, and count in the sums of their GPU.
#[test]
fn shares_of_partitions_are_in_the_tables() {
    let view = crate::view::of(&with_shared_partition(), &Usage::default());
    let claims = render(&top(&view, By::Claims, Some("web")), true);
    for (claim, granted) in [("web/draw", "2 GiB"), ("web/sing", "4 GiB")] {
        let row = claims.lines().find(|line| line.starts_with(claim));
        let row = row.unwrap_or_default();
        let says = row.contains("gpu-3-mig-1g10gb-19-1-ts") && row.contains(granted);
        assert!(says, "{claims}");
    }
    let gpus = render(&top(&view, By::Gpus, None), false);
    let row = gpus.lines().find(|line| line.contains("gpu-3"));
    let row: Vec<&str> = row.unwrap_or_default().split_whitespace().collect();
    assert_eq!(row[..4], ["n1", "gpu-3", "partitioned", "2"], "{gpus}");
    assert!(row.windows(2).any(|words| words == ["6", "GiB"]), "{gpus}");
}

#[test]
fn one_namespace_counts_alone() {
    let view = crate::view::of(&world(), &usage());
    let claims = render(&top(&view, By::Claims, Some("web")), false);
    assert!(
        claims.contains("web/chat") && !claims.contains("lab/"),
        "{claims}"
    );
    assert_eq!(
        render(&top(&view, By::Claims, Some("none")), false),
        "no claim holds a GPU"
    );
    let nodes = serde_json::to_value(top(&view, By::Nodes, Some("web"))).unwrap();
    assert_eq!(nodes["nodes"][0]["held"], 2);
}

#[test]
fn totals_show_how_much_of_them_is_known() {
    let total = |parts: &[Option<u64>]| {
        let mut total = Total::default();
        for part in parts {
            total.add(*part);
        }
        total.to_string()
    };
    assert_eq!(total(&[]), "-");
    assert_eq!(total(&[Some(0)]), "0 B");
    assert_eq!(total(&[None, None]), "?");
    assert_eq!(total(&[Some(1 << 30), None, Some(1 << 30)]), "≥ 2 GiB");
}
