//! Values of flags: each is checked where it is parsed, so that an error names the flag, the value
//! and what is expected. A chart sets variables for what was left empty, too: empty means the
//! default.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;

use divvy_api::{DEVICE_NODE, is_device_node};
use divvy_model::mig::ProfileVariant;
use divvy_offer::ModeLock;

pub(crate) fn node_name(text: &str) -> Result<String, String> {
    expect(
        text,
        is_dns_subdomain(text, 253),
        "a node's name (DNS subdomain)",
    )
}

pub(crate) fn driver_name(text: &str) -> Result<String, String> {
    expect(
        text,
        is_dns_subdomain(text, 63),
        "a DNS subdomain of at most 63 lower-case characters, as gpu.divvy.dev",
    )
}

pub(crate) fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() {
        Ok(path)
    } else {
        Err("expected an absolute path".to_owned())
    }
}

pub(crate) fn absolute_or_none(text: &str) -> Result<Option<PathBuf>, String> {
    if text.is_empty() {
        Ok(None)
    } else {
        absolute(text).map(Some)
    }
}

#[expect(
    clippy::unnecessary_wraps,
    reason = "clap wants a parser that may fail"
)]
pub(crate) fn path_or_none(text: &str) -> Result<Option<PathBuf>, String> {
    Ok((!text.is_empty()).then(|| PathBuf::from(text)))
}

pub(crate) fn pod_uid(text: &str) -> Result<Option<String>, String> {
    // Becomes part of socket names: nothing in it may lead to another folder.
    let is_uid = text.len() <= 63 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let uid = expect(text, is_uid, "a pod's UID (letters, digits and dashes)")?;
    Ok(Some(uid).filter(|uid| !uid.is_empty()))
}

pub(crate) fn mode_lock(text: &str) -> Result<ModeLock, String> {
    match text {
        "auto" | "" => Ok(ModeLock::Auto),
        "on" => Ok(ModeLock::On),
        "off" => Ok(ModeLock::Off),
        _ => Err("expected auto, on or off".to_owned()),
    }
}

/// Parses suffixes of MIG profiles.
pub(crate) fn variants(text: &str) -> Result<BTreeSet<ProfileVariant>, String> {
    const RARE: [ProfileVariant; 4] = [
        ProfileVariant::Media,
        ProfileVariant::AllMedia,
        ProfileVariant::NoMedia,
        ProfileVariant::Graphics,
    ];
    each(text, |suffix| {
        let mut rare = RARE.into_iter();
        rare.find(|variant| variant.suffix() == Some(suffix))
            .ok_or_else(|| {
                format!(
                    "{suffix:?} is no such suffix; expected +me, +me.all, -me or +gfx, separated by commas"
                )
            })
    })
}

pub(crate) fn xids(text: &str) -> Result<BTreeSet<u32>, String> {
    each(text, |number| {
        number.parse().map_err(|_| {
            format!(
                "{number:?} is no number; expected Xid numbers, separated by commas, as 109,119"
            )
        })
    })
}

pub(crate) fn device_nodes(text: &str) -> Result<Vec<String>, String> {
    each(text, |path| {
        if is_device_node(path) {
            Ok(path.to_owned())
        } else {
            Err(format!(
                "{path:?} is none; expected {DEVICE_NODE}, several separated by commas"
            ))
        }
    })
}

/// Parses the addresses of a server, of which the first that can be bound is used. `:9440` is every
/// address of the machine, IPv6 included where there is any; empty is none.
pub(crate) fn addresses(text: &str) -> Result<Vec<SocketAddr>, String> {
    let refused =
        |()| "expected an address and a port, as 127.0.0.1:9440 or :9440, or nothing".to_owned();
    match text.strip_prefix(':') {
        _ if text.is_empty() => Ok(Vec::new()),
        Some(port) => {
            let port: u16 = port.parse().map_err(|_| refused(()))?;
            Ok(vec![
                // IPv6 first: where the kernel has it, such a socket usually takes IPv4 connections
                // too.
                (Ipv6Addr::UNSPECIFIED, port).into(),
                (Ipv4Addr::UNSPECIFIED, port).into(),
            ])
        }
        None => Ok(vec![text.parse().map_err(|_| refused(()))?]),
    }
}

/// Parses values separated by commas.
fn each<T, C: FromIterator<T>>(
    text: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<C, String> {
    let parts = text.split(',').map(str::trim);
    parts.filter(|part| !part.is_empty()).map(parse).collect()
}

fn expect(text: &str, ok: bool, what: &str) -> Result<String, String> {
    if ok {
        Ok(text.to_owned())
    } else {
        Err(format!("expected {what}"))
    }
}

fn is_dns_subdomain(text: &str, longest: usize) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.len() <= longest
        && text.split('.').all(|label| {
            label.bytes().all(|b| alphanumeric(b) || b == b'-')
                && label.bytes().next().is_some_and(alphanumeric)
                && label.bytes().last().is_some_and(alphanumeric)
        })
}
