//! `divvy ui`: the fleet on a page, served to the browser of one user with the rights of that user.
//! Nothing is deployed, and nothing can be changed.

mod guard;
mod saved;
mod server;
#[cfg(test)]
mod tests;

use std::future::pending;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::FutureExt as _;
use tokio::net::TcpListener;

use self::guard::{Guard, Secrets};
pub use self::server::{Page, Reading, Source};
use crate::Usage;
use crate::format;
use crate::status::read::Access;

/// Time from the end of one reading of the cluster to the next.
const EVERY: Duration = Duration::from_secs(5);

/// Arguments of `divvy ui`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    access: Access,
    /// The namespace whose claims and pods are read if those of all namespaces may not be
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// Name of the driver; by default the one that most nodes report
    #[arg(long, value_name = "NAME")]
    driver_name: Option<String>,
    /// Where to listen; other machines can reach what is not a loopback address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Name under which browsers may ask for the page, HOST or HOST:PORT; required beyond loopback
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,
    /// Do not open a browser
    #[arg(long)]
    no_open: bool,
    /// Show a view that the page's link "Save this view" has written, and read no cluster
    #[arg(long, value_name = "FILE", conflicts_with_all = ["namespace", "driver_name"])]
    from: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if !args.listen.ip().is_loopback() && args.allow_host.is_empty() {
        let message = format!(
            "--listen {}: other machines can reach this address; name the host that browsers use with --allow-host HOST, \
             or listen on 127.0.0.1",
            args.listen
        );
        return Err(Usage(message).into());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    if let Some(path) = &args.from {
        let page = Page::of_saved(saved::read(path)?);
        runtime.block_on(async {
            open(page, args.listen, &args.allow_host, !args.no_open)
                .await?
                .await;
            anyhow::Ok(())
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    runtime.block_on(async {
        let (client, namespace, server) = args.access.client().await?;
        let namespace = args.namespace.clone().unwrap_or(namespace);
        let driver = args.driver_name.clone();
        let cluster = args.access.context_name().unwrap_or_else(|| server.clone());
        let source: Source = Box::new(move || {
            let (client, namespace, driver) = (client.clone(), namespace.clone(), driver.clone());
            let cluster = Some(cluster.clone());
            async move {
                let (snapshot, usage) =
                    crate::top::read(&client, driver.as_deref(), &namespace).await?;
                Ok(Reading {
                    snapshot,
                    usage,
                    caption: None,
                    cluster,
                })
            }
            .boxed()
        });
        // A cluster that does not answer is an error here, not on a page.
        let first = source().await.context(server)?;
        let page = Page::new(source, EVERY);
        page.show(Ok(first));
        open(page, args.listen, &args.allow_host, !args.no_open)
            .await?
            .await;
        anyhow::Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Serves a page until the process is interrupted: a future that is to be awaited. Its address is
/// printed first.
pub async fn open(
    page: Page,
    listen: SocketAddr,
    allowed: &[String],
    browse: bool,
) -> Result<impl Future<Output = ()> + use<>> {
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("--listen {listen}"))?;
    let address = listener.local_addr()?;
    let guard = Guard::new(address, allowed, Secrets::new()?);
    let url = guard.url();
    format::print(&url)?;
    format::talk("the link works once, in one browser; Ctrl-C ends this");
    if !address.ip().is_loopback() {
        format::talk(
            "beyond this machine the page travels unencrypted: put a proxy with TLS before it",
        );
    }
    if browse {
        start_browser(&url);
    }
    let serving = server::serve(page, guard, listener, pending());
    Ok(async move {
        tokio::select! {
            () = serving => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    })
}

/// Where there is a desktop. The link is printed, so that failure needs no words.
fn start_browser(url: &str) {
    let desktop = ["DISPLAY", "WAYLAND_DISPLAY"]
        .iter()
        .any(|name| std::env::var_os(name).is_some());
    let program = if cfg!(target_os = "macos") {
        "open"
    } else {
        "xdg-open"
    };
    if desktop || cfg!(target_os = "macos") {
        let mut command = Command::new(program);
        let _ = command
            .arg(url)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
    }
}
