//! The fake API server on a loopback port, for programs in other processes.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tower::Service;

use super::FakeApi;

/// A listening server; dropping it closes the port and all connections.
#[derive(Debug)]
pub struct HttpServer {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl HttpServer {
    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A kubeconfig file's content that leads here.
    pub fn kubeconfig(&self) -> String {
        let url = self.url();
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: fake\n\
             clusters:\n- name: fake\n  cluster:\n    server: {url}\n\
             contexts:\n- name: fake\n  context:\n    cluster: fake\n    user: fake\n\
             users:\n- name: fake\n  user: {{}}\n"
        )
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakeApi {
    /// Serves on a free loopback port. While the server is stopped, connections are refused.
    pub async fn serve_http(&self) -> io::Result<HttpServer> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(accept(self.clone(), listener, address));
        Ok(HttpServer { address, task })
    }
}

async fn accept(api: FakeApi, first: TcpListener, address: SocketAddr) {
    let mut listener = Some(first);
    loop {
        api.until(|state| state.running).await;
        let bound = match listener.take() {
            Some(bound) => Ok(bound),
            None => TcpListener::bind(address).await,
        };
        match bound {
            // Dropping the connections with the set is what stopping looks like from outside.
            Ok(bound) => {
                let mut connections = JoinSet::new();
                tokio::select! {
                    () = api.until(|state| !state.running) => {}
                    () = serve(&api, &bound, &mut connections) => {}
                }
            }
            // Another process has the port for a moment: any connection of this machine may.
            Err(error) => {
                tracing::error!(%address, %error, "the fake API server cannot listen again");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve(api: &FakeApi, listener: &TcpListener, connections: &mut JoinSet<()>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            return;
        };
        let api = api.clone();
        connections.spawn(async move {
            let answer = |request: hyper::Request<Incoming>| {
                let mut api = api.clone();
                async move { api.call(request).await }
            };
            // An injected fault ends the connection with an error, as meant; the peer sees it.
            if let Err(error) = http1::Builder::new()
                .serve_connection(TokioIo::new(stream), hyper::service::service_fn(answer))
                .await
            {
                tracing::debug!(%error, "a connection to the fake API server ended");
            }
        });
        while connections.try_join_next().is_some() {}
    }
}
