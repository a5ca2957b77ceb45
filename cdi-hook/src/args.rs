//! The command line. By hand: a parser library would be most of this program.

use crate::error::HookError;
use crate::limits::Share;

const HELP: &str = "\
divvy-cdi-hook: makes GPU driver libraries findable in a container.
Called by container runtimes as a createContainer hook, with the container's state on stdin.

  create-symlinks --link TARGET::LINK [--link ...]   links in the container; existing ones are replaced
  update-ldcache --folder FOLDER [--folder ...]      enters libraries of these folders into /etc/ld.so.cache
  enable-cuda-compat --host-driver-version VERSION --folder FOLDER
                                                     an image's newer libraries of CUDA win over those in the folder
  update-application-profile                         EGL and Vulkan look at this container's GPUs only
  disable-device-node-modification                   NVIDIA's libraries leave device nodes alone
  The word `then` between them runs several in one call, in this order, until one fails.
  limits --socket PATH --claim UID --device NAME     as a createRuntime hook: divvy's node plugin caps a share's memory
  --version, --help
";
/// Word between sub-commands of one call.
const THEN: &str = "then";
const VERSION: &str = concat!("divvy-cdi-hook ", env!("CARGO_PKG_VERSION"), "\n");

/// Sub-command with its arguments, by what it needs of the container.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// Text to show; no container is needed.
    Show(&'static str),
    /// Cap of a share's memory; the container's process is needed.
    Limits(Share),
    /// Changes in the container's root, in this order.
    InRoot(Vec<InRoot>),
}

/// Sub-command that needs the container's root.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum InRoot {
    CreateSymlinks(Vec<Link>),
    UpdateLdCache(Vec<String>),
    EnableCudaCompat {
        host_driver: String,
        /// Folder of the host's libraries.
        folder: String,
    },
    UpdateApplicationProfile,
    DisableDeviceNodeModification,
}

/// Link to make.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) target: String,
    /// Path of the link in the container.
    pub(crate) path: String,
}

/// Parses the arguments behind the program's name.
pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Command, HookError> {
    let command = arguments.next().unwrap_or_default();
    match command.as_str() {
        "--help" | "-h" | "help" => Ok(Command::Show(HELP)),
        "--version" => Ok(Command::Show(VERSION)),
        "limits" => share(arguments).map(Command::Limits),
        "" => Err(HookError::Usage("a sub-command is missing".to_owned())),
        name => steps(name, arguments).map(Command::InRoot),
    }
}

/// Parses sub-commands that need the container's root, with [`THEN`] between them.
fn steps(first: &str, arguments: impl Iterator<Item = String>) -> Result<Vec<InRoot>, HookError> {
    let words: Vec<String> = std::iter::once(first.to_owned()).chain(arguments).collect();
    let step = |words: &[String]| match words.split_first() {
        Some((name, rest)) => in_root(name, rest.iter().cloned()),
        None => Err(HookError::Usage("a sub-command is missing".to_owned())),
    };
    words.split(|word| word == THEN).map(step).collect()
}

/// Parses the arguments of `limits`.
fn share(arguments: impl Iterator<Item = String>) -> Result<Share, HookError> {
    let [socket, claim, device] = values(arguments, ["--socket", "--claim", "--device"])?;
    let once = |values: Vec<String>| <[String; 1]>::try_from(values).ok().map(|[value]| value);
    match (once(socket), once(claim), once(device)) {
        (Some(socket), Some(claim), Some(device)) => {
            check_path(&socket)?;
            Ok(Share {
                socket,
                claim,
                device,
            })
        }
        _ => Err(HookError::Usage("each option may be given once".to_owned())),
    }
}

/// Parses a sub-command that needs the container's root.
fn in_root(name: &str, arguments: impl Iterator<Item = String>) -> Result<InRoot, HookError> {
    match name {
        "create-symlinks" => {
            let [links] = values(arguments, ["--link"])?;
            Ok(InRoot::CreateSymlinks(
                links
                    .iter()
                    .map(|text| link(text))
                    .collect::<Result<_, _>>()?,
            ))
        }
        "update-ldcache" => {
            let [folders] = values(arguments, ["--folder"])?;
            folders.iter().try_for_each(|folder| check_path(folder))?;
            Ok(InRoot::UpdateLdCache(folders))
        }
        "enable-cuda-compat" => {
            let [versions, folders] = values(arguments, ["--host-driver-version", "--folder"])?;
            folders.iter().try_for_each(|folder| check_path(folder))?;
            match (
                <[String; 1]>::try_from(versions),
                <[String; 1]>::try_from(folders),
            ) {
                (Ok([host_driver]), Ok([folder])) => Ok(InRoot::EnableCudaCompat {
                    host_driver,
                    folder,
                }),
                _ => Err(HookError::Usage("each option may be given once".to_owned())),
            }
        }
        "disable-device-node-modification" => {
            none(arguments, InRoot::DisableDeviceNodeModification)
        }
        "update-application-profile" => none(arguments, InRoot::UpdateApplicationProfile),
        other => Err(HookError::Usage(format!("unknown sub-command {other:?}"))),
    }
}

/// Returns a command that takes no option; fails if one is given.
fn none(mut arguments: impl Iterator<Item = String>, command: InRoot) -> Result<InRoot, HookError> {
    match arguments.next() {
        None => Ok(command),
        Some(more) => Err(HookError::Usage(format!("unexpected argument {more:?}"))),
    }
}

/// Collects the values of options, each of which must be given once and may be given more often, as
/// `--name value` or `--name=value`.
fn values<const N: usize>(
    mut arguments: impl Iterator<Item = String>,
    names: [&str; N],
) -> Result<[Vec<String>; N], HookError> {
    let mut values = [const { Vec::new() }; N];
    while let Some(argument) = arguments.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument.as_str(), arguments.next()),
        };
        let known = names
            .iter()
            .zip(&mut values)
            .find(|(known, _)| **known == name);
        let (Some((_, known)), Some(value)) = (known, value) else {
            let expected = names.join(" or ");
            return Err(HookError::Usage(format!(
                "expected {expected} with a value, got {argument:?}"
            )));
        };
        known.push(value);
    }
    match names
        .iter()
        .zip(&values)
        .find(|(_, values)| values.is_empty())
    {
        Some((name, _)) => Err(HookError::Usage(format!("{name} is missing"))),
        None => Ok(values),
    }
}

/// Parses `target::/absolute/link`.
fn link(text: &str) -> Result<Link, HookError> {
    let wrong = || {
        HookError::Usage(format!(
            "{text:?} is not of the form target::/absolute/link"
        ))
    };
    let (target, path) = text.split_once("::").ok_or_else(wrong)?;
    if target.is_empty() || target.contains('\0') {
        return Err(wrong());
    }
    check_path(path)?;
    Ok(Link {
        target: target.to_owned(),
        path: path.to_owned(),
    })
}

/// Fails unless a path is absolute, without `..`, and of one line.
fn check_path(path: &str) -> Result<(), HookError> {
    let good = path.starts_with('/')
        && path.len() > 1
        && !path.ends_with('/')
        && !path.contains(['\0', '\n'])
        && path.split('/').all(|part| part != "..");
    if good {
        Ok(())
    } else {
        Err(HookError::Usage(format!(
            "{path:?} must be an absolute path without '..'"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        parse(line.split(' ').map(str::to_owned)).map_err(|error| error.to_string())
    }

    #[test]
    fn commands_are_understood_in_both_ways_of_writing_options() {
        let link = |target: &str, path: &str| Link {
            target: target.into(),
            path: path.into(),
        };
        let in_root = |command| Ok(Command::InRoot(vec![command]));
        assert_eq!(
            parsed("create-symlinks --link a.so.1::/l/a.so --link=../b::/l/c/b"),
            in_root(InRoot::CreateSymlinks(vec![
                link("a.so.1", "/l/a.so"),
                link("../b", "/l/c/b")
            ]))
        );
        assert_eq!(
            parsed("update-ldcache --folder /l --folder=/m"),
            in_root(InRoot::UpdateLdCache(vec!["/l".into(), "/m".into()]))
        );
        assert_eq!(
            parsed("disable-device-node-modification"),
            in_root(InRoot::DisableDeviceNodeModification)
        );
        let compat = "enable-cuda-compat --folder /l --host-driver-version=580.1";
        let expected = InRoot::EnableCudaCompat {
            host_driver: "580.1".into(),
            folder: "/l".into(),
        };
        assert_eq!(parsed(compat), in_root(expected));
        let share = || Share {
            socket: "/run/s".to_owned(),
            claim: "u".to_owned(),
            device: "d".to_owned(),
        };
        assert_eq!(
            parsed("limits --socket /run/s --claim u --device=d"),
            Ok(Command::Limits(share()))
        );
        assert_eq!(parsed("--version"), Ok(Command::Show(VERSION)));
        let both = "update-ldcache --folder /l then update-application-profile";
        let expected = vec![
            InRoot::UpdateLdCache(vec!["/l".into()]),
            InRoot::UpdateApplicationProfile,
        ];
        assert_eq!(parsed(both), Ok(Command::InRoot(expected)));
    }

    /// Written to the loader's files, a newline would begin another line, and a NUL end a name.
    #[test]
    fn paths_that_would_be_others_where_they_are_written_are_refused() {
        for path in ["/l\n/m", "/l\0", "/l/", "/"] {
            let folder = ["update-ldcache", "--folder", path].map(str::to_owned);
            let link = format!("a::{path}");
            let link = ["create-symlinks", "--link", &link].map(str::to_owned);
            for line in [folder, link] {
                let error = parse(line.into_iter()).unwrap_err().to_string();
                let expected = format!("{path:?} must be an absolute path without '..'");
                assert!(error.starts_with(&expected), "{error}");
            }
        }
        let link = ["create-symlinks", "--link", "a\0b::/l"].map(str::to_owned);
        assert!(parse(link.into_iter()).is_err());
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (line, expected) in [
            ("", "a sub-command is missing"),
            ("chmod", "unknown sub-command \"chmod\""),
            (
                "update-application-profile then chmod",
                "unknown sub-command \"chmod\"",
            ),
            (
                "update-application-profile then",
                "a sub-command is missing",
            ),
            (
                "update-application-profile then limits",
                "unknown sub-command \"limits\"",
            ),
            ("update-ldcache", "--folder is missing"),
            (
                "update-ldcache --folder",
                "expected --folder with a value, got \"--folder\"",
            ),
            (
                "update-ldcache --fold /l",
                "expected --folder with a value, got \"--fold\"",
            ),
            (
                "update-ldcache --folder l",
                "\"l\" must be an absolute path without '..'",
            ),
            (
                "update-ldcache --folder /a/../b",
                "\"/a/../b\" must be an absolute path without '..'",
            ),
            (
                "create-symlinks --link a",
                "\"a\" is not of the form target::/absolute/link",
            ),
            (
                "create-symlinks --link ::/a",
                "\"::/a\" is not of the form target::/absolute/link",
            ),
            (
                "create-symlinks --link a::b",
                "\"b\" must be an absolute path without '..'",
            ),
            (
                "enable-cuda-compat --folder /l",
                "--host-driver-version is missing",
            ),
            (
                "enable-cuda-compat --l",
                "expected --host-driver-version or --folder with a value, got \"--l\"",
            ),
            (
                "enable-cuda-compat --folder /l --host-driver-version 1 --folder /m",
                "each option may be given once",
            ),
            ("update-application-profile x", "unexpected argument \"x\""),
            (
                "disable-device-node-modification x",
                "unexpected argument \"x\"",
            ),
        ] {
            assert_eq!(
                parsed(line).unwrap_err(),
                format!("{expected}; see divvy-cdi-hook --help"),
                "{line}"
            );
        }
    }
}
