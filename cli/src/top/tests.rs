//! The tables over the made-up fleet of the view.

use super::{By, Total, render, top};
use crate::usage::Usage;
use crate::view::tests::{usage, world};

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
