//! Whole batches on a storage in memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::test_store::TestStore;
use crate::{
    BackendFailure, BackendResponse, BatchEndpoint, BatchError, BatchOptions, BatchRecord, BatchService,
    BatchStatus, InferenceBackend, LineRequest, NewBatch, NewFile, PageQuery, RequestCounts,
};

pub(crate) const OPTIONS: BatchOptions = BatchOptions {
    concurrency: 4,
    max_load: 0.5,
    max_file_bytes: 1 << 20,
    max_stored_bytes: 1 << 20,
    max_line_bytes: 1 << 10,
    window: Duration::from_secs(86_400),
    retention: Duration::from_secs(86_400),
};

/// Answers with the prompt. The prompt is a script: `400`, `503 once`, `hang`, or any other text.
#[derive(Debug, Default)]
pub(crate) struct EchoBackend {
    attempts: Mutex<HashMap<String, u32>>,
    load: Mutex<f64>,
}

impl EchoBackend {
    fn attempts_of(&self, prompt: &str) -> u32 {
        self.attempts.lock().get(prompt).copied().unwrap_or(0)
    }
}

impl InferenceBackend for EchoBackend {
    fn load(&self) -> f64 {
        *self.load.lock()
    }

    async fn send(&self, request: LineRequest) -> Result<BackendResponse, BackendFailure> {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        let prompt = body["prompt"].as_str().unwrap();
        let attempt = {
            let mut attempts = self.attempts.lock();
            let attempts = attempts.entry(prompt.to_owned()).or_default();
            *attempts += 1;
            *attempts
        };
        sleep(Duration::from_millis(30)).await;
        let status = match prompt {
            "hang" => std::future::pending().await,
            "gone" => return Err(BackendFailure("no response".to_owned())),
            "400" => 400,
            "502" => 502,
            "503 once" if attempt == 1 => 503,
            _ => 200,
        };
        let body = format!("{{\n\"echo\": {}}}", request.body.escape_ascii().to_string().len());
        Ok(BackendResponse { status, retry_after: None, body: body.into() })
    }
}

fn input(prompts: &[&str]) -> NewFile {
    let lines = prompts.iter().enumerate().map(|(number, prompt)| {
        format!(
            "{{\"custom_id\":\"line-{number}\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{{\"prompt\":{prompt:?}}}}}\n"
        )
    });
    NewFile { filename: "in.jsonl".to_owned(), content: lines.collect::<String>().into() }
}

async fn open(store: &TestStore, options: BatchOptions) -> BatchService {
    BatchService::open(Arc::new(store.clone()), options).await.unwrap()
}

pub(crate) async fn create(service: &BatchService, prompts: &[&str]) -> Result<BatchRecord, BatchError> {
    let input_file = service.create_file("a", input(prompts)).await?.id;
    let batch = NewBatch { input_file, endpoint: BatchEndpoint::Completions, metadata: BTreeMap::new() };
    service.create_batch("a", batch).await
}

/// Runs the service until `condition` holds.
pub(crate) async fn run_until(service: &BatchService, backend: &EchoBackend, condition: impl Fn() -> bool) {
    let stop = CancellationToken::new();
    let watch = async {
        while !condition() {
            sleep(Duration::from_millis(1)).await;
        }
        stop.cancel();
    };
    tokio::join!(service.run(backend, stop.clone()), watch);
}

pub(crate) async fn run_to_end(service: &BatchService, backend: &EchoBackend, batch: &str) -> BatchRecord {
    run_until(service, backend, || service.batch("a", batch).unwrap().status.is_final()).await;
    service.batch("a", batch).unwrap()
}

pub(crate) async fn lines_of(service: &BatchService, file: &Option<String>) -> Vec<Value> {
    let Some(id) = file else { return Vec::new() };
    let file = service.file("a", id).unwrap();
    let content = service.read_file(&file, 0, usize::MAX).await.unwrap();
    assert_eq!((content.len() as u64, crc32fast::hash(&content)), (file.bytes, file.crc32));
    content
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect()
}

pub(crate) fn ids(lines: &[Value]) -> Vec<&str> {
    lines.iter().map(|line| line["custom_id"].as_str().unwrap()).collect()
}

#[tokio::test(start_paused = true)]
async fn results_are_in_order_and_failures_in_a_file_of_their_own() {
    let (store, backend) = (TestStore::default(), EchoBackend::default());
    let service = open(&store, OPTIONS).await;
    let batch = create(&service, &["503 once", "x", "400", "gone", "502", "y"]).await.unwrap();
    let batch = run_to_end(&service, &backend, &batch.id).await;
    assert_eq!(batch.status, BatchStatus::Completed);
    assert_eq!(batch.counts, RequestCounts { total: 6, completed: 3, failed: 3 });
    let output = lines_of(&service, &batch.output_file).await;
    assert_eq!(ids(&output), ["line-0", "line-1", "line-5"]);
    assert_eq!(output[1]["response"]["status_code"], 200);
    assert!(output[1]["response"]["body"]["echo"].is_number() && output[1]["error"].is_null());
    let errors = lines_of(&service, &batch.error_file).await;
    assert_eq!(ids(&errors), ["line-2", "line-3", "line-4"]);
    assert_eq!(errors[0]["response"]["status_code"], 400);
    assert_eq!(errors[1]["error"]["code"], "request_failed");
    assert_eq!(["gone", "502", "400", "503 once"].map(|prompt| backend.attempts_of(prompt)), [3, 3, 1, 2]);
    assert!(!store.keys().iter().any(|key| key.starts_with("results/")), "{:?}", store.keys());
}

#[tokio::test(start_paused = true)]
async fn invalid_input_fails_the_batch() {
    let (store, backend) = (TestStore::default(), EchoBackend::default());
    let service = open(&store, OPTIONS).await;
    let content = "{\"custom_id\":1}\nx\n".into();
    let input_file =
        service.create_file("a", NewFile { filename: "in".to_owned(), content }).await.unwrap().id;
    let batch = NewBatch { input_file, endpoint: BatchEndpoint::Embeddings, metadata: BTreeMap::new() };
    let batch = service.create_batch("a", batch).await.unwrap();
    let batch = run_to_end(&service, &backend, &batch.id).await;
    assert_eq!((batch.status, batch.errors.len()), (BatchStatus::Failed, 2));
    assert_eq!(batch.errors[1].line, Some(2));
}

#[tokio::test(start_paused = true)]
async fn no_line_starts_while_the_fleet_is_busy() {
    let (store, backend) = (TestStore::default(), EchoBackend::default());
    let service = open(&store, OPTIONS).await;
    let batch = create(&service, &["x"]).await.unwrap().id;
    *backend.load.lock() = 0.5;
    let start = tokio::time::Instant::now();
    run_until(&service, &backend, || start.elapsed() > Duration::from_secs(60)).await;
    assert_eq!(service.batch("a", &batch).unwrap().status, BatchStatus::InProgress);
    assert_eq!(backend.attempts_of("x"), 0);
    *backend.load.lock() = 0.49;
    assert_eq!(run_to_end(&service, &backend, &batch).await.status, BatchStatus::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_batch_has_the_results_so_far() {
    let (store, backend) = (TestStore::default(), EchoBackend::default());
    let service = open(&store, OPTIONS).await;
    let batch = create(&service, &["x", "hang", "y"]).await.unwrap().id;
    let service = &service;
    let cancel = async {
        while service.batch("a", &batch).unwrap().counts.completed < 2 {
            sleep(Duration::from_millis(1)).await;
        }
        assert!(matches!(
            service.delete_file("a", &service.batch("a", &batch).unwrap().input_file).await,
            Err(BatchError::Invalid { .. })
        ));
        service.cancel_batch("a", &batch).await.unwrap()
    };
    let (ended, cancelling) = tokio::join!(run_to_end(service, &backend, &batch), cancel);
    assert_eq!((cancelling.status, ended.status), (BatchStatus::Cancelling, BatchStatus::Cancelled));
    assert_eq!(ids(&lines_of(service, &ended.output_file).await), ["line-0", "line-2"]);
    assert_eq!(ended.error_file, None);
    assert!(matches!(service.cancel_batch("a", &batch).await, Err(BatchError::Invalid { .. })));
    service.delete_file("a", &ended.input_file).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_batch_expires_with_an_error_for_each_line() {
    let (store, backend) = (TestStore::default(), EchoBackend::default());
    let service = open(&store, BatchOptions { window: Duration::from_secs(1), ..OPTIONS }).await;
    let batch = create(&service, &["x", "hang", "y"]).await.unwrap().id;
    let ended = run_to_end(&service, &backend, &batch).await;
    assert_eq!(ended.status, BatchStatus::Expired);
    assert_eq!(ended.counts, RequestCounts { total: 3, completed: 2, failed: 1 });
    assert_eq!(ids(&lines_of(&service, &ended.output_file).await), ["line-0", "line-2"]);
    let errors = lines_of(&service, &ended.error_file).await;
    assert_eq!((ids(&errors), &errors[0]["error"]["code"]), (vec!["line-1"], &Value::from("batch_expired")));
}

#[tokio::test(start_paused = true)]
async fn tenants_do_not_see_each_other() {
    let store = TestStore::default();
    let service = open(&store, OPTIONS).await;
    let batch = create(&service, &["x"]).await.unwrap();
    assert!(matches!(service.file("b", &batch.input_file), Err(BatchError::NoSuchFile(_))));
    assert!(matches!(service.batch("b", &batch.id), Err(BatchError::NoSuchBatch(_))));
    assert!(matches!(service.cancel_batch("b", &batch.id).await, Err(BatchError::NoSuchBatch(_))));
    assert!(matches!(service.delete_file("b", &batch.input_file).await, Err(BatchError::NoSuchFile(_))));
    let theirs = NewBatch {
        input_file: batch.input_file.clone(),
        endpoint: BatchEndpoint::Completions,
        metadata: BTreeMap::new(),
    };
    assert!(matches!(service.create_batch("b", theirs).await, Err(BatchError::NoSuchFile(_))));
    let query = PageQuery { limit: 10, ..PageQuery::default() };
    assert!(service.files("b", None, &query).unwrap().items.is_empty());
    assert!(service.batches("b", &query).unwrap().items.is_empty());
    assert_eq!(service.batches("a", &query).unwrap().items.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn uploads_are_bounded() {
    let store = TestStore::default();
    let service = open(&store, BatchOptions { max_stored_bytes: 300, ..OPTIONS }).await;
    service.create_file("a", input(&["x"])).await.unwrap();
    assert!(matches!(service.create_file("b", input(&["x", "y", "z"])).await, Err(BatchError::Full(_))));
    let large = NewFile { filename: String::new(), content: vec![b' '; 2 << 20].into() };
    assert!(matches!(service.create_file("a", large).await, Err(BatchError::Invalid { param: "file", .. })));
    assert_eq!(store.keys().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn damaged_state_is_reported_and_never_taken_for_empty() {
    let (store, backend) = (TestStore::default(), EchoBackend::default());
    let service = open(&store, OPTIONS).await;
    let [batch, other] =
        [create(&service, &["x", "hang"]).await.unwrap(), create(&service, &["y"]).await.unwrap()];
    run_until(&service, &backend, || {
        service.batch("a", &batch.id).unwrap().counts.completed == 1
            && service.batch("a", &other.id).unwrap().status.is_final()
    })
    .await;
    let healthy = store.copy();
    for key in [format!("batches/{}.record", batch.id), format!("files/{}.record", batch.input_file)] {
        let store = healthy.copy();
        store.damage(&key);
        let before = store.keys();
        let service = open(&store, OPTIONS).await;
        assert_eq!(service.stats().damaged, 1, "{key}");
        let of_batch =
            service.batch("a", &batch.id).map(drop).and(service.file("a", &batch.input_file).map(drop));
        assert!(matches!(of_batch, Err(BatchError::Damaged { .. })), "{key}: {of_batch:?}");
        assert_eq!(service.batch("a", &other.id).unwrap().status, BatchStatus::Completed);
        assert_eq!(store.keys(), before, "nothing is removed");
    }
    for key in [format!("results/{}.00000000", batch.id), format!("files/{}.content", batch.input_file)] {
        let store = healthy.copy();
        store.damage(&key);
        let service = open(&store, OPTIONS).await;
        let ended = run_to_end(&service, &backend, &batch.id).await;
        assert_eq!((ended.status, &*ended.errors[0].code), (BatchStatus::Failed, "storage_damaged"), "{key}");
    }
}

#[tokio::test(start_paused = true)]
async fn ended_batches_are_removed_after_their_retention() {
    let (store, backend) = (TestStore::default(), EchoBackend::default());
    let service = open(&store, OPTIONS).await;
    let batch = create(&service, &["x"]).await.unwrap();
    let ended = run_to_end(&service, &backend, &batch.id).await;
    let mut old = ended.clone();
    old.entered_at.insert(BatchStatus::Completed, 1);
    let framed = crate::record::encode(&old).unwrap();
    crate::BlobStore::put(&store, &format!("batches/{}.record", old.id), framed).await.unwrap();
    let service = open(&store, OPTIONS).await;
    run_until(&service, &backend, || service.batch("a", &batch.id).is_err()).await;
    assert_eq!(ids(&lines_of(&service, &ended.output_file).await), ["line-0"], "files stay");
}
