//! What a selector reads of a device, as far as the expression says it in so many words.
//!
//! Two devices that agree in all of it are the same to the selector, whatever else tells them apart: most of a
//! cluster's GPUs differ in little but UUID and address.

use cel::common::ast::{CallExpr, EntryExpr, Expr, IdedExpr, LiteralValue, operators};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};

/// One thing that is read.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Read {
    /// `device.allowMultipleAllocations`.
    Shared,
    /// `device.attributes["domain"].id`.
    Attribute(Name),
    /// `device.capacity["domain"].id`.
    Capacity(Name),
}

/// The name of an attribute or capacity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    domain: String,
    id: String,
    /// `domain/id`, as a device may spell it.
    qualified: String,
}

impl Name {
    fn new(domain: &str, id: &str) -> Self {
        Self { domain: domain.to_owned(), id: id.to_owned(), qualified: format!("{domain}/{id}") }
    }

    fn find<'m, V>(&self, driver: &str, map: &'m std::collections::BTreeMap<String, V>) -> Option<&'m V> {
        let bare = if self.domain == driver { map.get(&self.id) } else { None };
        bare.or_else(|| map.get(&self.qualified))
    }
}

/// What was read of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Seen<'d> {
    Shared(bool),
    Attribute(Option<&'d DeviceAttribute>),
    Capacity(Option<&'d str>),
}

impl Read {
    pub(super) fn of<'d>(&self, driver: &str, device: &'d Device) -> Seen<'d> {
        match self {
            Self::Shared => Seen::Shared(device.allow_multiple_allocations.unwrap_or(false)),
            Self::Attribute(name) => {
                Seen::Attribute(device.attributes.as_ref().and_then(|map| name.find(driver, map)))
            }
            Self::Capacity(name) => {
                let found = device.capacity.as_ref().and_then(|map| name.find(driver, map));
                Seen::Capacity(found.map(|capacity| capacity.value.0.as_str()))
            }
        }
    }
}

/// Everything that the expression reads beside the driver's name; `None` where that depends on the device.
pub(super) fn of(expression: &IdedExpr) -> Option<Vec<Read>> {
    let mut reads = Vec::new();
    walk(expression, &mut reads)?;
    reads.sort_unstable();
    reads.dedup();
    Some(reads)
}

fn walk(expression: &IdedExpr, reads: &mut Vec<Read>) -> Option<()> {
    if let Some(read) = read(&expression.expr) {
        reads.extend(read);
        return Some(());
    }
    match &expression.expr {
        // Alone, or selected from in a way that is not known: it can go anywhere.
        Expr::Ident(name) => (name.strip_prefix('.').unwrap_or(name) != "device").then_some(()),
        Expr::Select(select) => walk(&select.operand, reads),
        Expr::Call(call) => {
            let mut parts = call.target.iter().map(Box::as_ref).chain(&call.args);
            parts.try_for_each(|part| walk(part, reads))
        }
        Expr::Comprehension(c) => [&c.iter_range, &c.accu_init, &c.loop_cond, &c.loop_step, &c.result]
            .into_iter()
            .try_for_each(|part| walk(part, reads)),
        Expr::List(list) => list.elements.iter().try_for_each(|element| walk(element, reads)),
        Expr::Map(map) => map.entries.iter().try_for_each(|entry| match &entry.expr {
            EntryExpr::MapEntry(entry) => walk(&entry.key, reads).and_then(|()| walk(&entry.value, reads)),
            EntryExpr::StructField(_) => None,
        }),
        Expr::Literal(_) => Some(()),
        Expr::Struct(_) | Expr::Unspecified => None,
    }
}

/// What this very expression reads, if it is one of the known forms; the driver's name is no read.
fn read(expression: &Expr) -> Option<Vec<Read>> {
    if let Expr::Select(select) = expression
        && is_device(&select.operand)
    {
        return match select.field.as_str() {
            "driver" => Some(Vec::new()),
            "allowMultipleAllocations" => Some(vec![Read::Shared]),
            _ => None,
        };
    }
    let (map, id) = match expression {
        Expr::Select(select) => (select.operand.as_ref(), select.field.as_str()),
        Expr::Call(call) => match (call.func_name.as_str(), arguments(call)?) {
            (operators::INDEX | operators::OPT_INDEX | operators::OPT_SELECT, [map, id]) => {
                (map, literal(id)?)
            }
            (operators::IN, [id, map]) => (map, literal(id)?),
            _ => return None,
        },
        _ => return None,
    };
    // `device.attributes["domain"]`, or the same of `device.capacity`.
    let Expr::Call(index) = &map.expr else { return None };
    let (operators::INDEX, [maps, domain]) = (index.func_name.as_str(), arguments(index)?) else {
        return None;
    };
    let Expr::Select(select) = &maps.expr else { return None };
    if !is_device(&select.operand) || select.test {
        return None;
    }
    let name = Name::new(literal(domain)?, id);
    match select.field.as_str() {
        "attributes" => Some(vec![Read::Attribute(name)]),
        "capacity" => Some(vec![Read::Capacity(name)]),
        _ => None,
    }
}

fn is_device(expression: &IdedExpr) -> bool {
    matches!(&expression.expr, Expr::Ident(name) if name == "device")
}

fn arguments(call: &CallExpr) -> Option<[&IdedExpr; 2]> {
    match (call.target.as_deref(), call.args.as_slice()) {
        (None, [first, second]) | (Some(first), [second]) => Some([first, second]),
        _ => None,
    }
}

fn literal(expression: &IdedExpr) -> Option<&str> {
    match &expression.expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cel::compile;

    /// What the expression reads, as text; `all` where that is not known.
    fn reads(expression: &str) -> String {
        let parsed = compile(expression).unwrap().expression;
        let Some(reads) = of(&parsed) else { return "all".to_owned() };
        let text = |read: &Read| match read {
            Read::Shared => "shared".to_owned(),
            Read::Attribute(name) => name.qualified.clone(),
            Read::Capacity(name) => format!("{} (capacity)", name.qualified),
        };
        reads.iter().map(text).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn what_an_expression_reads_is_known_where_it_says_so_itself() {
        for (expression, expected) in [
            ("true", ""),
            (r#"device.driver == "d""#, ""),
            ("device.allowMultipleAllocations", "shared"),
            (r#"device.attributes["d"].a == "x" || device.attributes["d"]["b"] == 1"#, "d/a, d/b"),
            (r#"has(device.attributes["d"].a) && "b" in device.attributes["d"]"#, "d/a, d/b"),
            (r#"device.attributes["d"].?a.orValue(0) == 1"#, "d/a"),
            (r#"device.capacity["d"].m.compareTo(quantity("1")) > 0"#, "d/m (capacity)"),
            (r#"["x"].exists(v, v == device.attributes["d"].a)"#, "d/a"),
            (r#"device.attributes["d" + "e"].a == 1"#, "all"),
            (r#""d" in device.attributes"#, "all"),
            (r#"device.attributes["d"].exists(name, name == "a")"#, "all"),
            (r#"cel.bind(mine, device.attributes["d"], mine.a == 1)"#, "all"),
            (r#"device.attributes.all(d, d != "x")"#, "all"),
        ] {
            assert_eq!(reads(expression), expected, "{expression}");
        }
    }
}
